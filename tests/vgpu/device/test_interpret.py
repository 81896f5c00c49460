"""Triton kernels that the configuration names compute; others do nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHOSEN = ["chosen_*", "follow_kernel", "add_kernel", "tuned_*", "refused_kernel"]


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN)
def test_only_what_is_chosen_computes() -> None:
    import torch

    from tests.vgpu.device import triton_kernels as kernels
    from vgpu import control

    of = torch.arange(40, dtype=torch.int32).cuda()
    to = torch.zeros_like(of)
    before = control.kernels()
    kernels.other_kernel[(1,)](to, 40, BLOCK=64)
    assert not to.cpu().any()
    for halve, factor in ((False, 2), (True, 1)):
        grid = lambda values: (-(-values["n"] // values["BLOCK"]),)  # noqa: E731
        kernels.chosen_kernel[grid](to, of, 40, halve, 0.5, BLOCK=32)
        expected = [factor * i + 2 if not halve else i // 2 * 2 + 2 for i in range(40)]
        assert to.tolist() == expected
    # Compiled as before: interpretation ends with its kernel.
    kernels.other_kernel[(1,)](to, 40, BLOCK=128)
    assert to.tolist() == expected
    assert control.kernels() - before == 4  # each is launched, and once
    kernels.tuned_kernel[lambda values: (-(-40 // values["BLOCK"]),)](to, 40)
    assert to.tolist() == list(range(39, -1, -1))


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN)
def test_pointers_in_memory_are_followed(capfd: pytest.CaptureFixture[str]) -> None:
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    values = torch.arange(5, 7, dtype=torch.int32).cuda()
    pinned = torch.full((1,), 8, dtype=torch.int32).pin_memory()
    at = [values.data_ptr() + 4, pinned.data_ptr()]
    to = torch.zeros(4, dtype=torch.int32, device="cuda")
    kernels.follow_kernel[(2,)](to, torch.tensor(at, dtype=torch.uint64).cuda())
    assert to.tolist() == [6, 8, 0, 0]
    assert "not mapped" not in capfd.readouterr().err
    noise = torch.tensor([64, to.data_ptr() + 2**33], dtype=torch.uint64).cuda()
    for _ in range(2):
        kernels.follow_kernel[(2,)](to, noise)
        assert to.tolist() == [0, 0, 0, 0]
    assert capfd.readouterr().err.count("follow_kernel touches what is not mapped") == 1


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN, strict=True)
def test_error_names_the_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    """Of an operation that the interpreter lacks, and, if strict, of an unmapped
    address."""
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    to = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(NotImplementedError, match="inline_asm") as raised:
        kernels.refused_kernel[(1,)](to)
    assert raised.value.__notes__ == ["in refused_kernel, interpreted on the host"]
    kernels.add_kernel[(1,)](to, to)  # nothing is left of it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.refused_kernel[(1,)](to)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        graph.replay()
    assert "in refused_kernel, interpreted" in capfd.readouterr().err
    noise = torch.tensor([64], dtype=torch.uint64).cuda()
    with pytest.raises(RuntimeError, match="an illegal memory access") as illegal:
        kernels.follow_kernel[(1,)](to, noise)
    assert illegal.value.__notes__ == ["in follow_kernel, interpreted on the host"]
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        torch.cuda.synchronize()


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN)
def test_graph_computes_with_each_launch() -> None:
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    to, of = (torch.full((1,), n, dtype=torch.int32).cuda() for n in (0, 3))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.add_kernel[(2,)](to, of)
    assert to.item() == 0
    graph.replay()
    of.copy_(torch.tensor([4]))
    graph.replay()
    assert to.item() == 2 * 3 + 2 * 4
    used = torch.cuda.memory_allocated()
    del to
    assert torch.cuda.memory_allocated() < used  # only the addresses are kept


@pytest.mark.vgpu(
    memory="1GiB", interpret=CHOSEN, streams_behind=True, behind_queries=0
)
def test_earlier_work_of_its_stream_is_done_first() -> None:
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    to, of = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    source = torch.full((1,), 7, dtype=torch.int32).pin_memory()
    other, unread = torch.cuda.Stream(), torch.zeros(1, dtype=torch.int32).cuda()
    with torch.cuda.stream(other):
        event = torch.cuda.Event()
        of.copy_(source, non_blocking=True)
        event.record()
        unread.copy_(source, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        event.wait()
        kernels.add_kernel[(1,)](to, of)
        source.fill_(9)  # a copy that is still to be done brings this
    torch.cuda.synchronize()
    assert (to.item(), unread.item()) == (7, 9)


def test_processes_of_the_run_find_it_and_the_users_own_sitecustomize(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden = True\n")
    script = (
        "import sys, torch\n"
        "assert sys.hidden and 'triton' not in sys.modules\n"
        "from tests.vgpu.device import triton_kernels as kernels\n"
        "of = torch.full((1,), 2, dtype=torch.int32).cuda()\n"
        "kernels.add_kernel[(1,)](of, of)\n"
        "assert of.item() == 4\n"
    )
    report = tmp_path / "report.jsonl"
    command = [
        sys.executable,
        "-m",
        "vgpu",
        '--set=interpret=["add_*"]',
        f"--report={report}",
    ]
    subprocess.run(
        [*command, "--", sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        check=True,
    )
    assert json.loads(report.read_text())["computed"] == 1


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN)
def test_bfloat16_is_computed_and_fp8_is_refused() -> None:
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    x, y, wide = torch.randn(3, 64) * 300
    x[0], y[0] = 256, 1
    x, y = x.bfloat16(), y.bfloat16()
    to = torch.zeros(2, 64, dtype=torch.bfloat16).cuda()
    given = [values.cuda() for values in (x, y, wide)]
    kernels.chosen_sum_kernel[(1,)](to, *given, 64, BLOCK=64)
    sums, narrowed = to.cpu()
    assert torch.equal(sums, torch.where(x < y, x + y, -(x * y)))
    assert torch.equal(narrowed, wide.bfloat16())
    to = torch.zeros(2, 64, dtype=torch.float8_e4m3fn).cuda()
    with pytest.raises(Exception, match="computes no FP8"):
        kernels.chosen_sum_kernel[(1,)](to, *given, 64, BLOCK=64)


@pytest.mark.vgpu(memory="1GiB", interpret=CHOSEN)
def test_rows_of_bfloat16_are_summed_and_multiplied() -> None:
    """Triton's interpreter alone adds and multiplies their bits as integers."""
    import torch

    from tests.vgpu.device import triton_kernels as kernels

    x = torch.arange(256).reshape(16, 16).remainder(7).bfloat16()
    to = torch.zeros(17, 16, dtype=torch.bfloat16).cuda()
    product = torch.zeros(16, 16).cuda()
    kernels.chosen_rows_kernel[(1,)](to, product, x.cuda(), BLOCK=16)
    sums, running = to.cpu()[0], to.cpu()[1:]
    assert torch.equal(sums, x.sum(1))
    assert torch.equal(running, x.cumsum(1))
    assert torch.equal(product.cpu(), x.float() @ x.float())
    with pytest.raises(Exception, match="no atomics of bfloat16"):
        kernels.add_kernel[(1,)](to, x.cuda())

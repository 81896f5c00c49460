"""Phases, injected failures, other processes; from inside, outside and config."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.vgpu.device.ctypes_cuda import GIB, MIB, OK, OUT_OF_MEMORY, Cuda
from vgpu import timeline
from vgpu.errors import VgpuError

G = 2 * MIB
ROOT = Path(__file__).resolve().parents[3]


def vgpu(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "vgpu", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


PRELUDE = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    "from tests.vgpu.device.ctypes_cuda import *\n"
    "from vgpu import control\ngpu = Cuda()\n"
)


def script(text: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", PRELUDE + text)


def test_off_the_device_control_says_so() -> None:
    from vgpu import control

    with pytest.raises(VgpuError, match="python -m vgpu"):
        control.used()


@pytest.mark.vgpu(memory="1GiB", other="100MiB")
def test_peaks_are_kept_for_each_phase() -> None:
    from vgpu import control

    gpu = Cuda()
    with control.phase("load"):
        _, a = gpu.malloc(100 * MIB)
        with control.phase("convert"):
            _, b = gpu.malloc(50 * MIB)
            gpu.free(b)
        gpu.free(a)
        _, a = gpu.malloc(20 * MIB)
    with control.phase("serve"):
        pass
    assert control.phase_peak("load") == 250 * MIB
    assert control.phase_peak("load", process=True) == 150 * MIB
    assert control.phase_peak("convert") == 250 * MIB
    assert control.phase_peak("serve") == 120 * MIB
    assert (control.used(), control.peak()) == (120 * MIB, 250 * MIB)
    assert (control.process_used(), control.process_peak()) == (20 * MIB, 150 * MIB)
    control.reset_peak()
    assert (control.peak(), control.process_peak()) == (120 * MIB, 20 * MIB)
    with pytest.raises(VgpuError, match="no phase"):
        control.phase_peak("never")


@pytest.mark.vgpu(memory="1GiB")
def test_nth_call_and_calls_over_a_size_fail() -> None:
    from vgpu import control

    gpu = Cuda()
    third = control.inject("cudaMalloc", nth=3)
    assert [gpu.malloc(G)[0] for _ in range(4)] == [OK, OK, OUT_OF_MEMORY, OK]
    assert third.fired == 1
    large = control.inject("cuMemCreate", over="4MiB", times=2)
    sizes = (G, 3 * G, 2 * G, 3 * G, 3 * G)
    assert [gpu.create(n)[0] for n in sizes] == [OK, 2, OK, 2, OK]
    assert large.fired == 2
    control.inject("cudaStreamCreateWithFlags", error="unknown")
    from ctypes import byref, c_int, c_void_p

    assert gpu.call("cudaStreamCreateWithFlags", byref(c_void_p()), c_int(0)) == 999


@pytest.mark.vgpu(memory="1GiB")
def test_pinned_host_memory_is_counted_in_pages() -> None:
    import mmap
    from ctypes import addressof, byref, c_char, c_size_t, c_uint, c_void_p

    from vgpu import control

    gpu = Cuda()
    page = mmap.PAGESIZE
    a = c_void_p()
    assert gpu.call("cudaHostAlloc", byref(a), c_size_t(page + 1), c_uint(0)) == OK
    assert control.pinned() == 2 * page
    memory = mmap.mmap(-1, 4 * page)
    start = addressof(c_char.from_buffer(memory))
    inside = c_void_p(start + page // 2)
    assert gpu.call("cudaHostRegister", inside, c_size_t(page), c_uint(0)) == OK
    assert control.pinned() == 4 * page
    assert gpu.call("cudaHostUnregister", inside) == OK
    assert gpu.call("cudaFreeHost", a) == OK
    assert (control.pinned(), control.pinned_peak()) == (0, 4 * page)
    control.reset_peak()
    assert control.pinned_peak() == 0


@pytest.mark.vgpu(memory="1GiB", synchronize_us=200000)
def test_waiting_for_the_device_takes_the_time_configured() -> None:
    gpu = Cuda()
    gpu.info()
    for call in ("cudaDeviceSynchronize", "cuCtxSynchronize"):
        start = time.monotonic()
        assert gpu.call(call) == OK
        assert time.monotonic() - start >= 0.2


@pytest.mark.vgpu(memory="1GiB")
def test_another_process_takes_and_gives() -> None:
    from vgpu import control

    gpu = Cuda()
    control.other_process("600MiB")
    assert gpu.malloc(500 * MIB)[0] == OUT_OF_MEMORY
    control.other_process("-200MiB")
    assert gpu.malloc(500 * MIB)[0] == OK
    control.other_process("1GiB")  # takes the rest
    assert gpu.info()[0] == 0
    control.other_process("-2GiB")  # returns all
    assert (control.other(), gpu.info()[0]) == (0, GIB - 500 * MIB)


@pytest.mark.vgpu(memory="1GiB")
def test_another_process_acts_at_an_allocation_and_at_a_phase() -> None:
    from vgpu import control

    gpu = Cuda()
    control.other_process("800MiB", at_allocation=3)
    control.other_process("-300MiB", at_phase="serve")
    errors = [gpu.malloc(100 * MIB)[0] for _ in range(3)]
    assert errors == [OK, OK, OUT_OF_MEMORY]
    with control.phase("serve"):
        assert gpu.malloc(100 * MIB)[0] == OK


@pytest.mark.vgpu(
    memory="1GiB",
    inject=[{"call": "cudaMalloc", "nth": 2}],
    moves=[{"bytes": "512MiB", "at_phase": "steal"}],
)
def test_failures_and_moves_may_be_configured() -> None:
    from vgpu import control

    gpu = Cuda()
    assert [gpu.malloc(G)[0] for _ in range(3)] == [OK, OUT_OF_MEMORY, OK]
    with control.phase("steal"):
        assert control.other() == 512 * MIB


def test_control_works_from_outside(tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = (
        "import sys; gpu.malloc(1 << 21); print('ready', flush=True)\n"
        "sys.stdin.readline(); print(gpu.malloc(900 << 20)[0], gpu.used() >> 20)"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "vgpu", "--memory", "1GiB", "--run-dir", str(run)]
        + list(script(text)),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout and child.stdin
    assert child.stdout.readline() == "ready\n"
    shown = vgpu("control", run, "other", "500MiB").stdout
    assert f"used {502 * MIB}" in shown and f"other {500 * MIB}" in shown
    vgpu("control", run, "other", "-100MiB")
    out, _ = child.communicate("\n")
    assert out == "2 402\n"
    failed = vgpu("control", tmp_path / "none", "status", check=False)
    assert failed.returncode == 2 and "is no run" in failed.stderr


def report(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_report_says_what_each_process_did(tmp_path: Path) -> None:
    path = tmp_path / "report"
    text = (
        "control.inject('cudaMalloc'); gpu.malloc(1 << 30); gpu.malloc(6 << 20)\n"
        "import ctypes; gpu.call('cuMulticastCreate', None, None)\n"
        "with control.phase('p'): a = gpu.malloc(4 << 20)[1]\n"
        "gpu.free(a)"
    )
    done = vgpu("--memory", "2GiB", "--report", path, *script(text))
    assert "calls that are not implemented: cuMulticastCreate 1" in done.stderr
    (only,) = report(path)
    assert only["devices"][0]["peak"] == 10 * MIB
    assert only["devices"][0]["used"] == 6 * MIB
    assert only["phases"]["p"][0]["peak"] == 10 * MIB
    assert only["not_implemented"] == {"cuMulticastCreate": 1}
    assert only["injected"] == [{"call": "cudaMalloc", "error": 2, "fired": 1}]


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), 9)", "pass"])
def test_process_that_ends_abruptly_still_tells(tmp_path: Path, end: str) -> None:
    path, events = tmp_path / "report", tmp_path / "timeline"
    text = f"import os; gpu.malloc(6 << 20); gpu.malloc(2 << 20); {end}"
    options = ("--memory", "1GiB", "--report", path, "--timeline", events)
    vgpu(*options, *script(text), check=False)
    assert report(path)[0]["devices"][0]["used"] == 8 * MIB
    causes = [(e.cause, e.bytes) for e in timeline.read(events)]
    assert causes == [
        ("cudaMalloc", 6 * MIB),
        ("cudaMalloc", 2 * MIB),
        ("process end", -8 * MIB),
    ]


def test_run_starts_its_files_afresh(tmp_path: Path) -> None:
    path, events = tmp_path / "report", tmp_path / "timeline"
    for _ in range(2):
        options = ("--report", path, "--timeline", events)
        vgpu(*options, *script("gpu.malloc(2 << 20)"))
    assert len(report(path)) == 1
    assert len(timeline.read(events)) == 2
    failed = vgpu("--report", tmp_path, *script(""), check=False)
    assert failed.returncode == 2 and "report: cannot write" in failed.stderr


def test_strict_makes_ignored_calls_fail() -> None:
    text = "print(gpu.call('cudaProfilerStart'), gpu.call('cuMulticastCreate'))"
    assert vgpu(*script(text)).stdout == "0 801\n"
    assert vgpu("--strict", *script(text)).stdout == "801 801\n"


def test_timeline_is_exact_and_drawn(tmp_path: Path) -> None:
    path, picture = tmp_path / "t.jsonl", tmp_path / "t.svg"
    text = (
        "import subprocess, sys\n"
        "with control.phase('load <weights>'):\n"
        "    a = gpu.malloc(64 << 20)[1]; h = gpu.create(32 << 20)[1]\n"
        "control.other_process('16MiB'); gpu.free(a)\n"
        "control.other_process('-16MiB'); gpu.release(h)\n"
    )
    settings = ("--set", "other=128MiB", "--set", "context=10MiB")
    vgpu("--memory", "1GiB", *settings, "--timeline", path, *script(text))
    events = timeline.read(path)
    series = timeline.series(events, 0)
    assert max(series.used) == (128 + 10 + 64 + 32 + 16) * MIB
    assert series.used[-1] == 128 * MIB
    assert all(sum(h) == u for h, u in zip(series.held, series.used, strict=True))
    assert {e.phase for e in events} >= {"", "load <weights>"}
    shown = vgpu("timeline", path, "--svg", picture).stdout
    for expected in ("cudaMalloc", "cuMemCreate", "context", "other processes"):
        assert expected in shown
    assert "250.00" in shown and "234.00" in shown  # peak, peak of the phase
    from xml.etree import ElementTree

    drawn = ElementTree.fromstring(picture.read_text())
    shapes = [e for e in drawn if e.tag.endswith("polygon")]
    assert len(shapes) == 4
    bad = tmp_path / "bad"
    bad.write_text("no\nevent\n")
    assert "is no timeline event" in vgpu("timeline", bad, check=False).stderr


def test_run_leaves_nothing_behind() -> None:
    text = "import os; gpu.malloc(1); print(os.environ['VGPU_RUN'])"
    run = Path(vgpu(*script(text)).stdout.strip())
    assert run.name.startswith("vgpu-") and not run.exists()


def test_next_run_removes_what_a_killed_launcher_left() -> None:
    text = "import os, sys; gpu.malloc(1); print(os.environ['VGPU_RUN'], flush=True)\n"
    launcher = subprocess.Popen(
        [sys.executable, "-m", "vgpu", *script(text + "sys.stdin.read()")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout and launcher.stdin
    run = Path(launcher.stdout.readline().strip())
    launcher.kill()
    launcher.wait()
    vgpu(*script(""))
    assert run.exists()  # its command still uses it
    launcher.stdin.close()
    launcher.stdout.read()
    for _ in range(50):
        vgpu(*script(""))
        if not run.exists():
            break
        time.sleep(0.1)
    assert not run.exists()


def test_launchers_that_start_at_once_remove_the_same_folders(tmp_path: Path) -> None:
    dead = subprocess.run(["sh", "-c", "echo $$"], stdout=subprocess.PIPE, text=True)
    for i in range(300):
        (tmp_path / f"vgpu-{dead.stdout.strip()}-{i}" / "sub").mkdir(parents=True)
    text = f"from vgpu import launch; launch._sweep(launch.Path({str(tmp_path)!r}))"
    launchers = [
        subprocess.Popen([sys.executable, "-c", text], cwd=ROOT) for _ in range(4)
    ]
    assert [launcher.wait(30) for launcher in launchers] == [0] * 4
    assert not list(tmp_path.iterdir())


def test_command_keeps_its_status_and_its_streams() -> None:
    done = vgpu("--", "sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert vgpu("--", "sh", "-c", "kill -9 $$", check=False).returncode == 137

"""Bad configuration is a clear error; good configuration has its effect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu import build, config
from vgpu.errors import VgpuError

ROOT = Path(__file__).resolve().parents[3]

BAD = {
    "memroy=1GiB": "unknown key 'memroy'.*did you mean memory",
    "memory=lots": "memory: 'lots' is no size",
    "memory=-1GiB": "out of range",
    "memory=0": "must be larger than 0",
    "memory=5 GoB": "no size",
    "memory=true": "a size is needed",
    "profile=h2000": "unknown profile 'h2000'; did you mean h200.*gb10, gb200",
    "devices=two": "devices: a whole number",
    "devices=99": "more than 16",
    "device.3.memory=1GiB": "device.3: there are 1 devices",
    "device.0.memroy=1GiB": "unknown key 'memroy' in device.0",
    "malloc_block=3000": "power of two",
    "vmm_granularity=512": "4 KiB or more",
    "compute_capability=nine": "no compute capability",
    "uuid=GPU-1": "is no UUID",
    "mig_uuid=GPU-00000000-0000-0000-0000-000000000000": "must begin with MIG-",
    "pci=1": "is no PCI address",
    "other=1TiB": "more than the device's memory",
    "integrated=maybe": "true or false",
    "page_cache=1GiB": "only an integrated device",
    "nvml=gone": "present or absent",
    "nvml_errors.nvmlInit=Broken": "unknown error 'Broken'.*NoPermission",
    "nvml_errors.cudaMalloc=NotSupported": "is no NVML call",
    "nvml_errors.nvmlInit@moon=NotSupported": "@parent or @device",
    "inject=[{}]": "call is needed",
    'inject=[{call="cudaMalloc", when=3}]': "unknown key 'when' in inject",
    'inject=[{call="cudaMalloc", error="sad"}]': "unknown error 'sad'",
    'moves=[{bytes="1GiB"}]': "one of at_allocation and at_phase",
    'moves=[{bytes="1GiB", at_phase="x", device=4}]': "there is no device 4",
    'hooks=[{kernel="x"}]': "argument is needed",
    'interpret="x"': "interpret: a list of patterns is needed",
    "interpret=[1]": "interpret: one line of text is needed",
    "timeline=/nowhere/at/all": "the folder /nowhere/at does not exist",
    "memory": "write KEY=VALUE",
}


@pytest.mark.parametrize("setting", BAD)
def test_bad_setting_is_named(setting: str) -> None:
    with pytest.raises(VgpuError, match=f"(?s){BAD[setting]}"):
        config.load(settings=[setting])


def test_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(VgpuError, match="cannot read .*none.toml"):
        config.load(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_text("memory = ")
    with pytest.raises(VgpuError, match="bad.toml is no TOML"):
        config.load(path)


def test_settings_win_over_options_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'profile = "h200"\ndevices = 2\nmemory = "10GiB"\nother = "1GiB"\n'
        '[device.1]\nmemory = "20GiB"\n'
    )
    loaded = config.load(path, ["other=3GiB"], memory="11GiB")
    assert [d["memory"] >> 30 for d in loaded.devices] == [11, 20]
    assert [d["other"] >> 30 for d in loaded.devices] == [3, 3]
    assert loaded.devices[0]["name"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "size"),
    [("23.5GiB", 25232932864), ("1 kb", 1000), (7, 7), ("2MiB", 2097152), ("0", 0)],
)
def test_sizes_are_parsed(text: object, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize("name", config.profiles())
def test_every_profile_is_complete(name: str) -> None:
    given = config.read_profile(name)
    wanted = {"name", "memory", "compute_capability", "sm_count", "l2_bytes"}
    assert wanted <= set(given)
    config.load(profile=name).lines()


# Of the second batch size that vLLM 0.19.0 captured on an H100: nodes of its full
# graph; its piecewise graphs and their nodes; MiB that both took, as logged.
LOGGED = {
    "Qwen3-8B": (433, 37, 325, 4 + 8),
    "Phi-4": (441, 41, 321, 4 + 6),
    "Kimi-Dev-72B": (881, 81, 641, 10 + 18),
    "Llama 70B W8A8": (1201, 81, 961, 14 + 20),
    "Qwen1.5-MoE": (577, 25, 505, 6 + 8),
    "DeepSeek-V2-Lite": (775, 28, 640, 8 + 10),
}


@pytest.mark.parametrize("model", LOGGED)
def test_graphs_of_an_h100_take_what_was_logged(model: str) -> None:
    full, graphs, nodes, logged = LOGGED[model]
    given = config.read_profile("h100")
    graph, node = (config.parse_size(given[key]) for key in ("graph", "graph_node"))
    taken = (1 + graphs) * graph + (full + nodes) * node
    assert abs(taken / 2**20 - logged) <= 4


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vgpu", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no COMMAND"),
        (("--memory", "1GiB"), "no COMMAND"),
        (("--memory", "1GiB", "--"), "no COMMAND after --"),
        (("--memory", "1 GoB", "--", "true"), "vgpu: memory: '1 GoB' is no size"),
        (("--profile", "rtx", "--", "true"), "vgpu: unknown profile 'rtx'"),
        (("--", "no-such-command"), "vgpu: cannot run no-such-command"),
        (("--mem", "1GiB", "--", "true"), "unrecognized arguments: --mem"),
    ],
)
def test_command_line_says_what_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    done = run("build", PATH=str(tmp_path), CC="", VGPU_BUILD_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "no C compiler: looked for $CC, cc, gcc and clang" in done.stderr
    assert not list(tmp_path.iterdir())


def test_compiler_that_fails_leaves_nothing(tmp_path: Path) -> None:
    done = run("build", CC="false", VGPU_BUILD_DIR=str(tmp_path))
    assert done.returncode == 2 and "the compiler failed (1)" in done.stderr
    assert not list(tmp_path.iterdir())


def environment(tmp_path: Path, *files: str, version: str = "2.0") -> str:
    """A folder in place of site-packages, with a torch of these files."""
    site = tmp_path / "site"
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(b"")
    (site / "torch-2.0.dist-info").mkdir(parents=True)
    (site / "torch-2.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )
    return str(site)


def test_missing_headers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path, "torch/lib/libtorch_cuda.so")
    monkeypatch.setattr(build, "site_packages", lambda: Path(site))
    with pytest.raises(VgpuError, match="no CUDA headers.*nvidia-cuda-runtime"):
        build.ensure()


def test_torch_without_cuda_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = environment(tmp_path, "torch/lib/libtorch_cpu.so", version="2.0+cpu")
    monkeypatch.setattr(build, "site_packages", lambda: Path(site))
    monkeypatch.setattr(build.metadata, "version", lambda _: "2.0+cpu")
    with pytest.raises(VgpuError, match=r"torch 2.0\+cpu has no CUDA"):
        build.ensure()


def test_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise build.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(build.metadata, "version", missing)
    with pytest.raises(VgpuError, match="no torch in the environment"):
        build.ensure()


def test_second_build_does_nothing() -> None:
    first = build.ensure()
    before = (first / "libcuda.so.1").stat().st_mtime_ns
    assert build.ensure() == first
    assert (first / "libcuda.so.1").stat().st_mtime_ns == before

"""The wheel is the official one plus the series, or there is no wheel."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from requests.exceptions import ChunkedEncodingError

from scripts import release
from tests.tools.project import INFO, METADATA, Project, tamper


@pytest.fixture
def built(patched: Project) -> Project:
    patched.ok("build_wheel", "--arch", "x86_64")
    return patched


def members(path: Path) -> dict[str, zipfile.ZipInfo]:
    with zipfile.ZipFile(path) as wheel:
        return {entry.filename: entry for entry in wheel.infolist()}


def stored(path: Path, entry: zipfile.ZipInfo) -> bytes:
    """A member's bytes as they lie in the file, still compressed."""
    with path.open("rb") as file:
        file.seek(entry.header_offset)
        header = file.read(30)
        name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        file.seek(name + extra, os.SEEK_CUR)
        return file.read(entry.compress_size)


def test_untouched_files_are_copied_compressed_bytes_and_all(
    built: Project, index: tuple[str, Path]
) -> None:
    official = index[1] / "vllm-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl"
    wheel = built.wheel()
    before, after = members(official), members(wheel)
    rewritten = {"vllm/budget.py", "vllm/native.abi3.so", "vllm/_version.py",
                 f"{INFO}/METADATA", f"{INFO}/RECORD"}  # fmt: skip
    assert after.keys() == {name.replace(INFO, built.info) for name in before}
    for name in before.keys() - rewritten:
        copy = after[name.replace(INFO, built.info)]
        assert stored(wheel, copy) == stored(official, before[name])
    with zipfile.ZipFile(wheel) as opened:
        assert opened.testzip() is None
        assert b"total // 2" in opened.read("vllm/budget.py")
        assert opened.read(f"{built.info}/METADATA").decode() == METADATA.replace(
            "Version: 1.2.3", f"Version: {built.version}"
        )
        scope: dict[str, object] = {}
        exec(opened.read("vllm/_version.py"), scope)
    assert re.fullmatch(r"1\.2\.3\+envelope\.2\.g[0-9a-f]{8}", built.version)
    assert scope["version"] == built.version
    assert scope["version_tuple"] == (1, 2, 3, built.version.partition("+")[2])
    assert str(scope["commit_id"]).startswith("gabcdef123.")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_both_architectures_verify(patched: Project, arch: str) -> None:
    patched.ok("build_wheel", "--arch", arch)
    wheel = str(patched.wheel(arch))
    assert "and the series, nothing else" in patched.ok("verify", wheel)


def test_same_inputs_give_the_same_wheel(built: Project) -> None:
    wheel = built.wheel()
    first = wheel.read_bytes()
    assert "is up to date" in built.ok("build_wheel", "--arch", "x86_64")
    wheel.unlink()
    built.ok("build_wheel", "--arch", "x86_64")
    assert wheel.read_bytes() == first


def test_longer_series_replaces_the_wheel(built: Project) -> None:
    built.commit("[Core] More", vllm__budget_py="def requested(total):\n    pass\n")
    built.ok("export")
    built.ok("build_wheel", "--arch", "x86_64")
    names = [path.name for path in (built.root / "dist").iterdir()]
    assert names == [built.wheel().name]


def test_damaged_wheel_is_built_again(built: Project) -> None:
    wheel = built.wheel()
    good = wheel.read_bytes()
    wheel.write_bytes(good[:-1])
    built.ok("build_wheel", "--arch", "x86_64")
    assert wheel.read_bytes() == good


def test_added_and_deleted_modules_follow(project: Project) -> None:
    project.ok("source")
    project.commit("[Core] Move", vllm__gone_py=None, vllm__come_py="HERE = 1\n")
    project.ok("export")
    project.ok("build_wheel", "--arch", "x86_64")
    wheel = project.wheel()
    assert "vllm/gone.py" not in members(wheel) and "vllm/come.py" in members(wheel)
    project.ok("verify", str(wheel))


def test_code_that_needs_cuda_to_build_is_refused(project: Project) -> None:
    project.ok("source")
    project.commit("[Kernel] Faster", **{"csrc__other.cu": "// faster\n"})
    project.ok("export")
    error = project.fails("build_wheel", "--arch", "x86_64")
    assert "csrc/other.cu, which cannot be rebuilt without CUDA" in error
    assert "Can be: csrc/native.cpp" in error
    assert not list((project.root / "dist").iterdir())


def test_compiler_error_is_shown(project: Project) -> None:
    project.ok("source")
    project.commit("[Build] Oops", **{"csrc__native.cpp": "int main( {\n"})
    project.ok("export")
    assert "expected" in project.fails("build_wheel", "--arch", "x86_64")


def test_hash_that_does_not_match(project: Project) -> None:
    base = project.patches / "base.toml"
    lines = base.read_text().splitlines()
    at = lines.index("[sdist]") + 2
    pinned, wanted = lines[at].split('"')[1], "0" * 64
    base.write_text("\n".join(lines).replace(pinned, wanted))
    error = project.fails("source")
    assert f"sha256 {wanted} wanted, {pinned} found" in error
    assert "Do not use it" in error
    assert not project.tree.exists()


def test_damaged_download_is_fetched_again(built: Project) -> None:
    (cached,) = Path(built.environment["ENVELOPE_CACHE"]).glob("*/*.whl")
    good = cached.read_bytes()
    cached.write_bytes(good[:100])
    built.wheel().unlink()
    built.ok("build_wheel", "--arch", "x86_64")
    assert cached.read_bytes() == good


@pytest.mark.parametrize(("breaks", "asked"), [(0, 1), (2, 3), (3, 3)])
def test_download_that_breaks_off_is_tried_again(
    breaks: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def download() -> None:
        tries.append(1)
        if len(tries) <= breaks:
            raise ChunkedEncodingError

    monkeypatch.setattr("time.sleep", lambda _: None)
    fails = breaks == 3
    with pytest.raises(ChunkedEncodingError) if fails else contextlib.nullcontext():
        release.persist(download)
    assert len(tries) == asked


def test_no_network(project: Project) -> None:
    project.environment["PIP_INDEX_URL"] = "http://127.0.0.1:9/"
    error = project.fails("source")
    assert "could not fetch vllm-1.2.3.tar.gz" in error and "try again" in error
    cache = project.environment["ENVELOPE_CACHE"]
    (folder,) = re.findall(rf"or put the file into ({cache}/\w+)\.", error)
    digest = tomllib.loads((project.patches / "base.toml").read_text())["sdist"]
    assert digest["sha256"].startswith(Path(folder).name)
    assert not project.tree.exists()


def test_index_without_the_release(project: Project) -> None:
    base = project.patches / "base.toml"
    base.write_text(base.read_text().replace("vllm-1.2.3.tar.gz", "vllm-1.2.4.tar.gz"))
    assert "the package index has no vllm-1.2.4.tar.gz" in project.fails("source")


def test_architecture_without_a_wheel(patched: Project) -> None:
    error = patched.fails("build_wheel", "--arch", "riscv64")
    assert "no wheel for 'riscv64'. Supported: aarch64, x86_64" in error


def test_full_disk_leaves_no_wheel(patched: Project) -> None:
    """Writing fails from the first byte over 256 KiB, as on a full disk."""

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, 256 << 10))

    patched.ok("build_wheel", "--arch", "x86_64")
    wheel = patched.wheel()
    large = os.urandom(1 << 20).hex()
    patched.commit("[Core] Large", vllm__budget_py=f"LARGE = '{large}'\n")
    patched.ok("export")
    before = patched.files()
    error = patched.fails("build_wheel", "--arch", "x86_64", preexec_fn=small_files)
    assert "no space left while writing" in error and "free some space" in error
    assert patched.files() == before and wheel.is_file()


def test_interrupted_build_can_be_run_again(patched: Project) -> None:
    """If killed at any moment, run it again: it succeeds, and leaves nothing over."""
    for delay in (0.1, 0.4, 0.8):
        process = subprocess.Popen(
            patched.command("build_wheel", "--arch", "x86_64"),
            env=patched.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.returncode in (-signal.SIGKILL, 0)
    patched.ok("build_wheel", "--arch", "x86_64")
    dist = patched.root / "dist"
    assert [path.name for path in dist.iterdir()] == [patched.wheel().name]


def test_two_commands_do_not_work_at_once(patched: Project) -> None:
    with (patched.root / "build/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another command is at work" in patched.fails("build_wheel")


TAMPERED = {
    "an untouched file": ("vllm/gone.py", b"UNUSED = 2\n", "no patch says so"),
    "a file too many": ("vllm/extra.py", b"", "no patch says so"),
    "a file too few": ("vllm/gone.py", None, "no patch says so"),
    "a patched file": ("vllm/budget.py", b"x", "is not the file in vllm/"),
    "the requirements": (
        "{info}/METADATA",
        METADATA.replace("torch", "jax").encode(),
        "METADATA differs in more than its version",
    ),
    "the version": (
        "vllm/_version.py",
        b"__version__ = version = '1'",
        "not say 1.2.3+",
    ),
    "native code": ("vllm/native.abi3.so", b"\x7fELF", "auditwheel cannot read"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_verify_finds_tampering(built: Project, what: str) -> None:
    name, content, message = TAMPERED[what]
    wheel = built.wheel()
    tamper(wheel, {name.format(info=built.info): content})
    error = built.fails("verify", str(wheel))
    assert message in error
    assert "RECORD" in error


def test_verify_finds_a_wrong_name(built: Project) -> None:
    wheel = built.wheel()
    other = wheel.rename(
        wheel.with_name(wheel.name.replace("envelope.2.", "envelope.9."))
    )
    assert "the file name should be" in built.fails("verify", str(other))


@pytest.mark.parametrize("installer", [["pip"], ["uv", "pip"]], ids=" ".join)
def test_wheel_installs(patched: Project, installer: list[str], tmp_path: Path) -> None:
    arch = os.uname().machine
    patched.ok("build_wheel", "--arch", arch)
    wheel, site = str(patched.wheel(arch)), tmp_path / "site"
    install = [sys.executable, "-m", *installer, "install", "--no-deps", "--target"]
    subprocess.run([*install, str(site), wheel], check=True, capture_output=True)
    (found,) = importlib.metadata.distributions(name="vllm", path=[str(site)])
    assert found.version == patched.version
    assert found.requires == ["torch"]
    assert (site / "vllm/budget.py").read_text().endswith("total // 2\n")


def test_pip_replaces_a_build_of_as_many_other_patches(
    patched: Project, tmp_path: Path
) -> None:
    """pip compares versions alone: findings/pip-keeps-a-rebuilt-local-version.sh."""
    environment = tmp_path / "environment"
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(venv, check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment)]
    versions: list[str] = []
    for change in "first", "second":
        patched.commit("[Core] Say", vllm__budget_py=f"SAYS = '{change}'\n")
        if versions:
            patched.git("reset", "-q", "--soft", "HEAD~2")
            patched.git("commit", "-q", "-m", "[Core] Say")
        patched.ok("export")
        patched.ok("build_wheel", "--arch", os.uname().machine)
        versions.append(patched.version)
        wheel = str(patched.wheel(os.uname().machine))
        install = [*pip, "install", "--no-deps", "--no-index", wheel]
        subprocess.run(install, check=True, capture_output=True)
        show = [
            str(environment / "bin/python"),
            "-c",
            "from vllm.budget import SAYS as s; print(s)",
        ]
        assert subprocess.check_output(show, text=True).strip() == change
    first, second = (version.split(".g")[0] for version in versions)
    assert first == second and versions[0] != versions[1]


def test_cache_is_trusted_by_hash_alone(built: Project) -> None:
    for path in Path(built.environment["ENVELOPE_CACHE"]).rglob("vllm-*"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest in (built.patches / "base.toml").read_text()


PIP = (sys.executable, "-m", "pip", "-q", "--python", "{}", "install")
UV = (sys.executable, "-m", "uv", "pip", "install", "-q", "-p", "{}")


@pytest.mark.parametrize(
    ("tool", "again"),
    [(PIP, ["--force-reinstall"]), (UV, ["--reinstall-package", "vllm"])],
    ids=["pip", "uv"],
)
def test_back_to_stock_and_locked(
    patched: Project,
    index: tuple[str, Path],
    tmp_path: Path,
    tool: tuple[str, ...],
    again: list[str],
) -> None:
    """What docs/install.md says to type."""
    arch = os.uname().machine
    patched.ok("build_wheel", "--arch", arch)
    wheel, environment = patched.wheel(arch), tmp_path / "environment"
    venv = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(venv, check=True)
    python = environment / "bin/python"
    called = [part.format(python) for part in tool] + ["--no-deps"]
    stock = ["--index-url", index[0], "vllm==1.2.3"]

    def install(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*called, *arguments], capture_output=True, text=True)

    def installed() -> str:
        code = "from importlib.metadata import version; print(version('vllm'))"
        return subprocess.check_output([python, "-c", code], text=True).strip()

    def lock(line: str, digest: str) -> list[str]:
        (tmp_path / "locked.txt").write_text(f"{line} --hash=sha256:{digest}\n")
        return ["--require-hashes", "--no-index", "--find-links", str(wheel.parent),
                "-r", str(tmp_path / "locked.txt")]  # fmt: skip

    assert not install(*stock).returncode
    assert installed() == "1.2.3"
    assert not install("--no-index", wheel).returncode
    assert installed() == patched.version
    install(*stock)
    assert installed() == patched.version, "the build is a 1.2.3"
    assert not install(*again, *stock).returncode
    assert installed() == "1.2.3"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for line in (f"vllm=={patched.version}", f"vllm @ {wheel.as_uri()}"):
        assert install(*lock(line, "0" * 64)).returncode
        assert installed() == "1.2.3"
        done = install(*lock(line, digest))
        assert not done.returncode, done.stderr
        assert installed() == patched.version
        assert not install(*again, *stock).returncode
    (official,) = index[1].glob(f"vllm-1.2.3-*_{arch}.whl")
    digest = hashlib.sha256(official.read_bytes()).hexdigest()
    assert install(*again, *lock("vllm==1.2.3", digest)).returncode
    assert not install(*again, "--find-links", wheel.parent, *stock).returncode
    assert installed() == patched.version

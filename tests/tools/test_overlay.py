"""An installed vLLM becomes the patched one and the official one again, or stays."""

from __future__ import annotations

import ast
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.installed import ARCH, Installed, make_overlay
from tests.tools.project import INFO, ROOT, Project, write_wheel


def record(files: dict[str, bytes], info: str) -> dict[str, list[str]]:
    rows = csv.reader(files.pop(f"{info}/RECORD").decode().splitlines())
    return {name: row for name, *row in rows}


def test_install_gives_the_patched_wheel_and_revert_the_official_one(
    make: Callable[..., Installed], built: Project
) -> None:
    official = make()
    before = official.tree()
    assert "5 files" in official.ok("install")
    patched = make(wheel=built.wheel(ARCH), name="patched").files()
    ours = official.files()
    theirs_rows, our_rows = (record(files, built.info) for files in (patched, ours))
    kept = {name for name in ours if "/envelope/" in name}
    written_by_uv = {f"{built.info}/{n}" for n in ("REQUESTED", "direct_url.json",
                                             "uv_cache.json")}  # fmt: skip
    for name in ours.keys() | patched.keys():
        if name not in kept | written_by_uv:
            assert ours[name] == patched[name], name
    assert {n: r for n, r in our_rows.items() if n not in kept | written_by_uv} == {
        n: r for n, r in theirs_rows.items() if n not in written_by_uv
    }
    assert kept < our_rows.keys()
    official.ok("revert")
    assert official.tree() == before


def test_bytecode_is_compiled_as_it_was(official: Installed) -> None:
    tag = f"{sys.implementation.cache_tag}.pyc"
    cache = official.site / "vllm/__pycache__"
    other = cache / "budget.cpython-39.pyc"
    other.write_bytes(b"of another Python")
    (cache / f"_version.{tag}").unlink()
    before = official.tree()
    official.ok("install")
    assert {path.name for path in cache.iterdir()} == {
        f"__init__.{tag}", f"budget.{tag}", f"come.{tag}", f"plan.{tag}",
    }  # fmt: skip
    stamp = int((official.site / "vllm/budget.py").stat().st_mtime)
    header = (cache / f"budget.{tag}").read_bytes()[4:12]
    assert header == bytes(4) + stamp.to_bytes(4, "little")
    script = "import vllm.budget as b; print(b.__cached__, b.requested(2))"
    command = [str(official.python), "-B", "-c", script]
    assert subprocess.check_output(command, text=True) == (
        f"{cache / f'budget.{tag}'} None\n"
    )
    # What Python writes on import afterwards does not outlive the revert.
    (cache / f"_version.{tag}").write_bytes(b"stale")
    official.ok("revert")
    assert official.tree() == before


@pytest.mark.parametrize("mode", ["CHECKED_HASH", "UNCHECKED_HASH"])
def test_bytecode_keeps_its_invalidation_mode(official: Installed, mode: str) -> None:
    pyc = official.site / f"vllm/__pycache__/budget.{sys.implementation.cache_tag}.pyc"
    source = official.site / "vllm/budget.py"
    command = f"import py_compile as p; p.compile({str(source)!r}, " \
              f"invalidation_mode=p.PycInvalidationMode.{mode})"  # fmt: skip
    subprocess.run([official.python, "-c", command], check=True)
    flags = pyc.read_bytes()[4:8]
    assert flags != bytes(4)
    official.ok("install")
    assert pyc.read_bytes()[4:8] == flags


def test_status_says_what_is_there(official: Installed) -> None:
    assert "vLLM 1.2.3 in" in official.ok("status")
    assert "no overlay" in official.ok("status")
    official.ok("install")
    assert f"vLLM {official.version} in" in official.ok("status")
    assert "already installed" in official.ok("install")
    official.write("vllm/budget.py", b"mine\n")
    assert "files were changed: vllm/budget.py" in official.fails("status")
    before = official.tree()
    assert "changed since the overlay was installed: vllm/budget.py" in (
        official.fails("revert")
    )
    assert official.tree() == before


DAMAGED = {
    "official/vllm/budget.py": None,
    "official/vllm/native.abi3.so": b"damaged",
    "RECORD.gz": b"damaged",
    "state.json": b"{",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_official_files_are_not_put_back(
    official: Installed, name: str
) -> None:
    official.ok("install")
    kept, content = official.info / "envelope" / name, DAMAGED[name]
    kept.unlink()
    if content is not None:
        kept.write_bytes(content)
    before = official.tree()
    error = official.fails("revert")
    assert "kept files are damaged" in error and name in error
    assert official.tree() == before


def test_bytecode_of_the_kept_files_is_not_left_behind(
    make: Callable[..., Installed],
) -> None:
    official = make()
    before = official.sources()
    official.ok("install")
    compile_all = [str(official.python), "-m", "compileall", "-q", str(official.site)]
    subprocess.run(compile_all, check=True)
    assert list(official.info.glob("envelope/official/**/*.pyc"))
    official.ok("revert")
    assert official.sources() == before
    assert not official.info.exists()


def test_new_folders_are_as_the_package_is(official: Installed) -> None:
    before = official.tree()
    mask = os.umask(0o077)
    try:
        official.ok("install")
        modes = {p.stat().st_mode for p in official.site.rglob("*") if p.is_dir()}
        official.ok("revert")
    finally:
        os.umask(mask)
    assert modes == {(official.site / "vllm").stat().st_mode}
    assert official.tree() == before


def test_uninstalling_vllm_leaves_nothing_behind(official: Installed) -> None:
    official.ok("install")
    uv = [sys.executable, "-m", "uv", "pip", "uninstall", "-q", "-p"]
    subprocess.run([*uv, official.python, "vllm"], check=True)
    assert not [p for p in official.site.iterdir() if "vllm" in p.name]


WRONG = {
    "foreign": ("vllm/budget.py", b"mine\n", "vllm/budget.py is not the official file"),
    "missing": ("vllm/budget.py", None, "vllm/budget.py is missing"),
    "unexpected": ("vllm/come.py", b"mine\n", "vllm/come.py should not be there"),
    "already patched": ("vllm/come.py", b"HERE = 1\n", "vllm/come.py is already"),
    "built elsewhere": ("vllm/native.abi3.so", b"other", "--other-build accepts"),
    "no RECORD": (f"{INFO}/RECORD", None, "RECORD is missing"),
}


@pytest.mark.parametrize("what", WRONG)
def test_file_that_is_not_official_is_named(official: Installed, what: str) -> None:
    name, content, message = WRONG[what]
    (official.site / name).unlink(missing_ok=True)
    if content is not None:
        (official.site / name).write_bytes(content)
    before = official.tree()
    assert message in official.fails("install")
    assert official.tree() == before


def test_another_build_of_the_release_can_be_accepted(
    make: Callable[..., Installed], index: tuple[str, Path], tmp_path: Path
) -> None:
    wheel = tmp_path / f"vllm-1.2.3-cp38-abi3-linux_{ARCH}.whl"
    write_wheel(wheel, native=b"built by someone else")
    env = make(wheel=wheel)
    assert "vllm/native.abi3.so is not the official file" in env.fails("install")
    before = env.tree()
    env.ok("install", "--other-build")
    env.ok("revert")
    assert env.tree() == before
    env.write("vllm/native.abi3.so", b"changed afterwards")
    assert "native.abi3.so is not" in env.fails("install", "--other-build")


@pytest.mark.parametrize("version", ["1.2.4", "1.2.3+envelope.3.gab12cd34"])
def test_another_version_is_refused(official: Installed, version: str) -> None:
    metadata = (official.site / INFO / "METADATA").read_bytes()
    changed = metadata.replace(b"Version: 1.2.3", f"Version: {version}".encode())
    official.write(f"{INFO}/METADATA", changed)
    before = official.tree()
    error = official.fails("install")
    assert f"for vLLM 1.2.3, {version} was found" in error
    assert "no overlay" in official.fails("revert")
    assert official.tree() == before


def test_environment_without_vllm_is_refused(official: Installed) -> None:
    shutil.rmtree(official.site / INFO)
    assert f"not installed for {official.python}" in official.fails("install")


def test_second_overlay_is_refused(
    official: Installed, built: Project, tmp_path: Path
) -> None:
    official.ok("install")
    shutil.copytree(built.root, tmp_path / "project")
    project = Project(tmp_path / "project", built.environment)
    project.commit("[Core] Once more", vllm__budget_py="LATER = 1\n")
    project.ok("export")
    first = official.version
    official.overlay = make_overlay(project)
    before = official.tree()
    error = official.fails("install")
    assert f"another overlay ({first}) is installed" in error
    assert official.tree() == before
    official.ok("revert")
    assert f"{project.version} installed" in official.ok("install")


def test_overlay_is_the_same_each_time(built: Project) -> None:
    (overlay,) = (built.root / "dist").glob(f"*-overlay-{ARCH}.pyz")
    first = overlay.read_bytes()
    assert make_overlay(built).read_bytes() == first


def test_installer_needs_python_3_10_and_its_library_alone() -> None:
    source = (ROOT / "scripts/overlay_installer.py").read_text()
    imports = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(source, feature_version=(3, 10)))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    names = {name.partition(".")[0] for name in imports}
    assert names <= sys.stdlib_module_names - {"tomllib"}


def test_overlay_needs_the_wheel(patched: Project) -> None:
    assert "'make wheel ARCH=aarch64' first" in (
        patched.fails("overlay", "--arch", "aarch64")
    )


def test_overlay_for_the_other_architecture(
    official: Installed, built: Project
) -> None:
    other = "aarch64" if ARCH == "x86_64" else "x86_64"
    official.overlay = make_overlay(built, other)
    assert f"for {other}, this is {ARCH}" in official.fails("install")

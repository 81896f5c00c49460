"""Fixtures of the tools' tests: an index, a project, environments with its wheel."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tools.installed import ARCH, Installed, install_wheel, make_overlay
from tests.tools.project import (
    ARCHES,
    EXTENSION,
    OLDER,
    PLAN,
    Project,
    new_project,
    sha256,
    write_sdist,
    write_wheel,
)


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a package index with two releases of vllm, and its folder."""
    folder = tmp_path_factory.mktemp("index")
    write_sdist(folder / "vllm-1.2.3.tar.gz")
    for arch in ARCHES:
        write_wheel(folder / f"vllm-1.2.3-cp38-abi3-manylinux_2_28_{arch}.whl")
    files = {p.name: sha256(p) for p in folder.glob("*.*")}
    older = folder / "older/vllm-1.2.2.tar.gz"
    older.parent.mkdir()
    write_sdist(older, OLDER)
    files[f"older/{older.name}"] = sha256(older)
    for arch in ARCHES:
        files[f"older/vllm-1.2.2-cp38-abi3-manylinux_2_28_{arch}.whl"] = "0" * 64
    (folder / "vllm").mkdir()
    links = "".join(
        f'<a href="../{name}#sha256={digest}">{Path(name).name}</a>'
        for name, digest in files.items()
    )
    (folder / "vllm/index.html").write_text(f"<!DOCTYPE html><body>{links}</body>")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", folder
        server.shutdown()


@pytest.fixture
def project(index: tuple[str, Path], tmp_path: Path) -> Project:
    return new_project(index, tmp_path)


@pytest.fixture
def patched(project: Project) -> Project:
    """A project with two exported patches: one of Python, one of native code."""
    project.ok("source")
    project.commit(
        "[Core] Halve the request",
        vllm__budget_py="def requested(total):\n    return total // 2\n",
    )
    project.commit("[Build] Initialise twice", **{"csrc__native.cpp": EXTENSION + "\n"})
    project.ok("export")
    return project


@pytest.fixture(scope="module")
def built(index: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with the wheel and the overlay of three patches.

    One replaces a module, one adds and deletes one, one changes native code.
    """
    project = new_project(index, tmp_path_factory.mktemp("overlay"))
    project.ok("source")
    project.commit("[Core] Halve", vllm__budget_py="def requested(total):\n    pass\n")
    project.commit("[Core] Move", vllm__gone_py=None, vllm__come_py="HERE = 1\n")
    project.commit("[Build] Mend", **{"csrc__native.cpp": "int answer = 42;\n"})
    project.ok("export")
    make_overlay(project)
    return project


@pytest.fixture
def make(
    built: Project, index: tuple[str, Path], tmp_path: Path
) -> Callable[..., Installed]:
    """Makes an environment with a wheel (the official one), for the overlay."""
    (official,) = index[1].glob(f"*_{ARCH}.whl")
    (overlay,) = (built.root / "dist").glob(f"*-overlay-{ARCH}.pyz")

    def made(*options: str, wheel: Path = official, name: str = "env") -> Installed:
        python = tmp_path / name / "bin/python"
        venv = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / name)]
        subprocess.run(venv, check=True)
        install_wheel(python, wheel, *options)
        return Installed(python, overlay)

    return made


@pytest.fixture
def official(make: Callable[..., Installed]) -> Installed:
    return make("--compile-bytecode")


@pytest.fixture
def series(project: Project) -> Project:
    """Patches that apply to 1.2.2, merge, are there already, and conflict."""
    return make_series(project)


def make_series(project: Project) -> Project:
    project.ok("source")
    project.commit(
        "[Core] Applies", vllm__budget_py="def requested(total):\n    pass\n"
    )
    plan = PLAN
    for subject, change in {"Merges": "e", "Taken": "i", "Conflicts": "p"}.items():
        plan = plan.replace(f"{change} = 1", f"{change} = 2")
        project.commit(f"[Core] {subject}", vllm__plan_py=plan)
    project.commit("[Core] Comes after", vllm__gone_py="UNUSED = 2\n")
    project.ok("export")
    return project

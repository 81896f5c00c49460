"""The Dockerfile, built for real on a stand-in for the official image."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.installed import ARCH, make_overlay
from tests.tools.project import Project

STAND_IN = "FROM scratch\nCOPY root/ /\nENV PATH=/usr/bin:/bin\n"
TOOLS = ("sh", "uname")


def libraries(program: Path) -> list[str]:
    """The shared libraries of a program, its loader included."""
    listed = subprocess.check_output(["ldd", program], text=True)
    return [word for word in listed.split() if word.startswith("/")]


def stand_in(folder: Path, wheel: Path) -> None:
    """This machine's Python with the official wheel, as the root of an image."""
    root = folder / "root"
    python = Path(sys.executable).resolve()
    programs = {Path(shutil.which(name) or name): name for name in TOOLS}
    programs[python] = "python3"
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = list((stdlib / "lib-dynload").glob("*.so"))
    files = {library for p in [*programs, *extensions] for library in libraries(p)}
    (root / "usr/bin").mkdir(parents=True)
    (root / "bin").mkdir()
    for program, name in programs.items():
        shutil.copy2(program, root / "usr/bin" / name)
    shutil.copy2(root / "usr/bin/sh", root / "bin/sh")
    for library in files:
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, root / library[1:])
    ignore = shutil.ignore_patterns("site-packages", "test", "config-*")
    home = root / str(stdlib)[1:]
    shutil.copytree(stdlib, home, ignore=ignore)
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps"]
    uv += ["--compile-bytecode", "--link-mode=copy", "--target"]
    subprocess.run([*uv, str(home / "site-packages"), str(wheel)], check=True)
    (root / "tmp").mkdir()
    (folder / "Dockerfile").write_text(STAND_IN)


@pytest.fixture
def builder(tmp_path: Path) -> Callable[..., str]:
    """Runs buildah on storage of its own; returns its output."""
    program = shutil.which("buildah")
    if program is None:
        message = "no builder: install buildah (on Debian, the package buildah)"
        assert "CI" not in os.environ, message
        pytest.skip(message)
    options = [program, "--storage-driver=vfs", f"--root={tmp_path}/storage",
               f"--runroot={tmp_path}/run"]  # fmt: skip
    wrapper = tmp_path / "builder"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(options)} "$@"\n')
    wrapper.chmod(0o755)

    def run(*arguments: str) -> str:
        return subprocess.check_output([str(wrapper), *arguments], text=True)

    return run


def test_image_is_the_official_one_and_a_small_layer(
    patched: Project,
    index: tuple[str, Path],
    builder: Callable[..., str],
    tmp_path: Path,
) -> None:
    (official,) = index[1].glob(f"*_{ARCH}.whl")
    overlay = make_overlay(patched)
    overlay.with_name(overlay.name.replace("1.2.3", "1.2.2")).write_bytes(b"older")
    stand_in(tmp_path, official)
    builder("build", "-q", "-t", "official:v1.2.3", str(tmp_path))
    patched.environment["BUILDAH_ISOLATION"] = "chroot"
    patched.ok("image", "--image", "localhost/official:v1.2.3", "--tag", "ours",
               "--builder", str(tmp_path / "builder"))  # fmt: skip
    builder("push", "-q", "ours", f"oci:{tmp_path / 'oci'}:ours")
    layers = image_layers(tmp_path / "oci")
    assert len(layers) == 2
    with tarfile.open(layers[1]) as layer:
        files = {m.name: m.size for m in layer.getmembers() if m.isfile()}
    names = {
        name.rpartition("site-packages/")[2]
        for name in files
        if not name.startswith("etc/")  # the builder's own: hosts, resolv.conf
    }
    assert {"vllm/budget.py", "vllm/native.abi3.so"} <= names
    assert "vllm/large.abi3.so" not in names
    assert all(name.startswith(("vllm", ".wh.vllm")) for name in names), names
    container = builder("from", "ours").strip()
    script = (
        "import vllm.budget as b, vllm._version as v; print(b.requested(8), v.version)"
    )
    run = ("run", "--isolation=chroot", container, "--", "python3", "-c", script)
    # Once in many runs, buildah loses what a program in a chroot prints.
    said = next(filter(None, (builder(*run).split() for _ in range(3))), [])
    assert said == ["4", patched.version]


def image_layers(folder: Path) -> list[Path]:
    """The layers of the only image of an OCI layout, the lowest first."""

    def blob(digest: str) -> Path:
        return folder / "blobs/sha256" / digest.removeprefix("sha256:")

    (manifest,) = json.loads((folder / "index.json").read_text())["manifests"]
    layers = json.loads(blob(manifest["digest"]).read_text())["layers"]
    return [blob(layer["digest"]) for layer in layers]


def test_foreign_image_is_not_built_on(
    patched: Project, builder: Callable[..., str], tmp_path: Path
) -> None:
    make_overlay(patched)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    builder("build", "-q", "-t", "foreign", str(tmp_path / "empty"))
    patched.environment["BUILDAH_ISOLATION"] = "chroot"
    error = patched.fails("image", "--image", "localhost/foreign", "--builder",
                          str(tmp_path / "builder"))  # fmt: skip
    tag = patched.version.replace("+", "-")
    assert f"could not build vllm-openai:{tag} on localhost/foreign" in error


def test_missing_overlay_is_named(patched: Project) -> None:
    assert "'make overlay'" in patched.fails("image")


def test_unknown_builder_is_refused(patched: Project) -> None:
    make_overlay(patched)
    error = patched.fails("image", "--builder", "no-builder --debug")
    assert "there is no command no-builder (BUILDER=...)" in error


def test_missing_builder_is_named(patched: Project) -> None:
    make_overlay(patched)
    fake = patched.root / "bin"
    fake.mkdir()
    patched.environment["PATH"] = str(fake)
    assert "no image builder works here" in patched.fails("image")
    (fake / "docker").write_text("#!/bin/sh\nexit 1\n")
    (fake / "docker").chmod(0o755)
    assert "Install one" in patched.fails("image")


def test_official_image_is_named_with_its_registry(
    patched: Project, tmp_path: Path
) -> None:
    """Debian's buildah searches no registry for "vllm/vllm-openai"."""
    make_overlay(patched)
    builder = tmp_path / "builder"
    builder.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    builder.chmod(0o755)
    for more, image in {
        (): "docker.io/vllm/vllm-openai:v1.2.3",
        ("--image", "vllm/vllm-openai@sha256:0"): "docker.io/vllm/vllm-openai@sha256:0",
        ("--image", "localhost/vllm/mine"): "localhost/vllm/mine",
    }.items():
        patched.ok("image", "--builder", str(builder), *more)
        assert f"IMAGE={image} " in (tmp_path / "said").read_text()

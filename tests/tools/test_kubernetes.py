"""The Kubernetes example: valid, coherent, and its script works as described."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from tests.tools.installed import Installed

EXAMPLE = Path(__file__).parents[2] / "deploy/kubernetes/vllm-on-a-slice.yaml"
KUBERNETES = "1.37"


@pytest.fixture
def pod() -> Any:
    (deployment,) = yaml.safe_load_all(EXAMPLE.read_text())
    return deployment["spec"]["template"]["spec"]


def test_it_is_valid() -> None:
    (deployment,) = yaml.safe_load_all(EXAMPLE.read_text())
    kubernetes_validate.validate(deployment, KUBERNETES, strict=True)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES, strict=True)


def test_limit_fits_into_the_slice(pod: Any) -> None:
    (server,) = pod["containers"]
    limits = server["resources"]["limits"]
    (gib,) = re.findall(r"--gpu-memory-limit-bytes=(\d+)G", " ".join(server["args"]))
    assert limits["nvidia.com/gpu"] == 1
    assert int(gib) << 10 < limits["nvidia.com/gpumem"]


def test_flag_of_the_limit_is_one_of_the_series(pod: Any) -> None:
    (flag,) = re.findall(r"--gpu-memory[a-z-]+", " ".join(pod["containers"][0]["args"]))
    patches = (EXAMPLE.parents[2] / "patches/v0.33.0").glob("*.patch")
    assert any(re.search(rf'^\+ +"{flag}"', p.read_text(), re.M) for p in patches)


def test_both_containers_run_the_image_of_the_release(pod: Any) -> None:
    images = {c["image"] for c in pod["initContainers"] + pod["containers"]}
    assert images == {"vllm/vllm-openai:v0.33.0"}


def test_every_mount_has_its_volume(pod: Any) -> None:
    mounted = {
        mount["name"]
        for container in pod["initContainers"] + pod["containers"]
        for mount in container["volumeMounts"]
    }
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_script_patches_a_copy_of_links(
    pod: Any, make: Callable[..., Installed], tmp_path: Path
) -> None:
    env = make("--compile-bytecode")
    before = env.tree()
    patched = tmp_path / "patched"
    patched.mkdir()
    (init,), (server,) = pod["initContainers"], pod["containers"]
    mounts = {m["name"]: m["mountPath"] for m in init["volumeMounts"]}
    (script,) = init["args"]
    script = script.replace(f"{mounts['overlay']}/overlay.pyz", str(env.overlay))
    script = script.replace(mounts["patched"], str(patched))
    path = f"{env.python.parent}{os.pathsep}{os.environ['PATH']}"
    for _ in range(2):  # a restarted pod runs it again on the same volume
        shown = subprocess.check_output(
            [*init["command"], script], env=os.environ | {"PATH": path}, text=True
        )
        assert f"installed in {patched}: 5 files" in shown
    assert env.tree() == before
    assert not (patched / "vllm/budget.py").is_symlink()
    assert (patched / "vllm/large.abi3.so").is_symlink()
    (found,) = (e["value"] for e in server["env"] if e["name"] == "PYTHONPATH")
    assert found == mounts["patched"]
    show = "import vllm.budget as b, vllm._version as v; print(b.__file__, v.version)"
    assert subprocess.check_output(
        [env.python, "-c", show], env={"PYTHONPATH": str(patched)}, text=True
    ).split() == [f"{patched}/vllm/budget.py", env.version]

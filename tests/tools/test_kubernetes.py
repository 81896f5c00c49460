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
def objects() -> dict[str, Any]:
    found = yaml.safe_load_all(EXAMPLE.read_text())
    return {one["kind"]: one for one in found}


@pytest.fixture
def pod(objects: dict[str, Any]) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


def test_it_is_valid(objects: dict[str, Any], pod: Any) -> None:
    assert objects.keys() == {"Deployment", "Service", "PersistentVolumeClaim"}
    for one in objects.values():
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    (container,) = pod["containers"]
    container["volumeMount"] = container.pop("volumeMounts")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects["Deployment"], KUBERNETES, strict=True)


def test_objects_refer_to_each_other(objects: dict[str, Any], pod: Any) -> None:
    service, spec = objects["Service"]["spec"], objects["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["selector"] == spec["selector"]["matchLabels"] == labels
    (server,) = pod["containers"]
    names = {port["name"] for port in server["ports"]}
    probes = (server[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    used = {probe["httpGet"]["port"] for probe in probes}
    assert {port["targetPort"] for port in service["ports"]} == used == names
    claims = [
        v["persistentVolumeClaim"] for v in pod["volumes"] if v["name"] == "models"
    ]
    assert claims == [
        {"claimName": objects["PersistentVolumeClaim"]["metadata"]["name"]}
    ]
    # One slice, one volume for one pod: the next one cannot start next to it.
    assert spec["strategy"] == {"type": "Recreate"}


def test_limit_is_that_of_the_rule(pod: Any) -> None:
    """Of docs/slice.md."""
    (server,) = pod["containers"]
    limits = server["resources"]["limits"]
    (mib,) = re.findall(r"--gpu-memory-limit-bytes=(\d+)M", " ".join(server["args"]))
    assert limits["nvidia.com/gpu"] == 1
    assert int(mib) == limits["nvidia.com/gpumem"] - 512
    page = (EXAMPLE.parents[2] / "docs/slice.md").read_text()
    for argument in server["args"][1:]:
        assert argument.replace("=", " ") in page


def test_flag_of_the_limit_is_one_of_the_series(pod: Any) -> None:
    flag = pod["containers"][0]["args"][1].partition("=")[0]
    patches = (EXAMPLE.parents[2] / "patches/v0.33.0").glob("*.patch")
    assert any(re.search(rf'^\+ +"{flag}"', p.read_text(), re.M) for p in patches)


def test_both_containers_run_one_image(pod: Any) -> None:
    images = {c["image"] for c in pod["initContainers"] + pod["containers"]}
    assert images == {"vllm/vllm-openai@sha256:DIGEST"}
    assert "s/sha256:DIGEST/$digest/" in EXAMPLE.read_text()


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

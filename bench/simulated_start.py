"""The start of an engine on a virtual card: its case and its outcome."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.model_files import CONFIG
from bench.scenarios.result import read_result
from bench.virtual import made_by
from scripts import caches
from scripts.commands import REPOSITORY, Problem
from scripts.release import Base
from vgpu import config as vgpu_config

GIB = 1 << 30
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "tekken.json",
)
# Flags of `vllm serve` that name another model, and a draft's in JSON or with a dot.
NAMED = re.compile(
    r"--(?:tokenizer|hf[-_]config[-_]path|spec[-_]model)[ =](\S+)"
    r"""|[."]model"?[ =:]+"?([^\s",}]+)"""
)
# How a start says that there is too little memory.
TOO_LITTLE = re.compile(
    r"out of memory|No available memory|KV cache|[Ff]ree memory on device|takes more "
    r"than|exceeds (available )?Mamba|does not fit",
)


@dataclass(frozen=True)
class Release:
    """A vLLM that can be started."""

    root: Path
    version: str
    ours: Path | None
    """The folder that is put before the official one on the path; None: official."""

    @classmethod
    def find(cls, root: Path, version: str, ours: Base | None) -> Release:
        """
        Raises:
            Problem: it has not been made.
        """
        folder = ours.unpacked if ours else None
        release = cls(root, version, folder)
        if not release.python.exists() or (folder and not folder.is_dir()):
            order = made_by(ours) if ours else f"make {release.name}/ready"
            raise Problem(f"'{order}' first.")
        return release

    @property
    def name(self) -> str:
        return f".venv-vllm-{self.version}"

    @property
    def python(self) -> Path:
        return self.root / self.name / "bin/python"

    @property
    def nvrtc(self) -> Path | None:
        """The folder of the compiler's parts, which it looks up by name alone."""
        parts = "lib/python*/site-packages/nvidia/*/lib/libnvrtc-builtins.so*"
        found = next((self.root / self.name).glob(parts), None)
        return found and found.parent


@dataclass(frozen=True)
class Asked:
    """A start: which vLLM, of which model, on which card."""

    release: Release
    model: str
    """A folder with config.json, or a name on the hub."""
    gpu: str | None
    """A profile of the virtual device; None: `device` has all."""
    flags: tuple[str, ...]
    warm: bool = False
    device: Mapping[str, object] = field(default_factory=dict)
    """Settings of the virtual device over the profile's."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def card(self) -> str:
        own = self.device.get("name")
        profile = vgpu_config.read_profile(self.gpu) if self.gpu else {}
        return str(own or profile["name"])


@dataclass
class Plan:
    asked: Asked
    result: dict[str, Any]
    """As plan_engine.py tells it."""
    tried: list[Plan] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return bool(self.result["outcome"] == "started")

    @property
    def tokens(self) -> int:
        return int(self.result.get("kv_tokens", 0))

    @property
    def requests(self) -> float | None:
        """Of full length, at once; None: a model without a KV cache."""
        found: float | None = self.result.get("concurrency")
        return found

    @property
    def weights_fit(self) -> bool:
        """False: the weights alone exceed the request, or loading them ended it."""
        weights = self.result.get("weights") or 0
        room = self.result.get("requested", weights)
        loaded = self.result.get("phase") != "weights"
        return self.fits or (weights <= room and (loaded or not weights))

    def in_short(self) -> str:
        if not self.fits:
            return f"does not fit ({why(self.result)})"
        if self.requests is None:
            return "fits: no KV cache"
        return (
            f"fits: {self.tokens:,} tokens of KV cache, "
            f"{self.requests:.2f} requests of full length"
        )

    def report(self) -> dict[str, Any]:
        """As memory_picture.py draws it."""
        result = self.result
        return dict(result.get("report") or {}) | {
            "device": self.asked.card,
            "total": result["total"],
            "free_before": result["free"],
            "held_before": result["non_torch_before"],
            "requested": result["requested"],
            "in_use": result["in_use"],
            "set_aside": self.set_aside(),
            "left": self.left(),
        }

    def set_aside(self) -> dict[str, int]:
        """Ours has more of these rows than the release."""
        told = (self.result.get("report") or self.result).get("set_aside", {})
        return {name: size or 0 for name, size in told.items()}

    def left(self) -> int:
        used = sum(self.result["in_use"].values()) + sum(self.set_aside().values())
        return int(self.result["requested"] - used)

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": Path(self.asked.model).name,
            "gpu": self.asked.gpu or self.asked.card,
            "vllm": self.result.get("version"),
            "release": "ours" if self.asked.release.ours else "official",
            "flags": list(self.asked.flags),
            "warm": self.asked.warm,
            "fits": self.fits,
            "result": self.result,
            "tried": [plan.as_dict() for plan in self.tried],
        }


def profile_of(gpu: str | None) -> str:
    return str(vgpu_config.read_profile(gpu)) if gpu else ""


def simulate(asked: Asked, folder: Path, label: str = "") -> Plan:
    """Start it; if it is to be warm, for the second time.

    Raises:
        Problem: it cannot be started on any card, as vLLM says.
    """
    own = Path(tempfile.mkdtemp(prefix="caches-", dir=folder))
    try:
        result = started(asked, own, label)
        if asked.warm and result["outcome"] == "started":
            result = started(asked, own, f"{label} warm")
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return Plan(asked, result)


def started(asked: Asked, own: Path, label: str) -> dict[str, Any]:
    """The result of plan_engine.py; `own` is the folder of the start's compiled
    kernels.

    Raises:
        Problem: it ended for another reason than memory, or said nothing.
    """
    release = asked.release
    # Its report says what started, as one of a card does.
    ours = [release.ours, REPOSITORY / "bench/report_plugin"] if release.ours else []
    paths = [*ours, REPOSITORY]
    given = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    libraries = [os.environ.get("LD_LIBRARY_PATH"), release.nvrtc]
    given["LD_LIBRARY_PATH"] = os.pathsep.join(str(path) for path in libraries if path)
    environment = caches.environment(
        os.environ | given,
        own,
        release.root / "build/kernels",
    ) | of_hub(asked, os.environ)
    case = {
        "model": asked.model,
        "flags": [*asked.flags, *of_dummies(asked.model)],
        "environment": dict(asked.environment),
    }
    settings = [f"--set={key}={toml(value)}" for key, value in asked.device.items()]
    settings.append(f"--set=devices={ranks(asked.flags)}")
    if asked.gpu:
        settings.append(f"--profile={asked.gpu}")
    order = [
        *(release.python, "-m", "vgpu", *settings, "--"),
        *(release.python, "-m", "bench.plan_engine", json.dumps(case)),
    ]
    with (own / "log").open("w+") as log:
        told = follow(order, environment, own, log, label or asked.card)
        log.seek(0)
        said = log.read()
    if told is None:
        raise Problem(f"The engine ended without a word:\n{said[-2000:]}")
    if told["outcome"] == "Dropped":
        raise Problem(told["error"])
    if told["outcome"] != "started" and not about_memory(told):
        raise Problem(plainly(told["error"]))
    return told


def ranks(flags: Sequence[str]) -> int:
    """The number of cards that an engine takes. Of a flag that is given twice, the
    last counts."""
    given = " ".join(flags).replace("_", "-")
    sizes = (r"(?:--tensor-parallel-size|-tp)", r"(?:--pipeline-parallel-size|-pp)")
    found = (re.findall(rf"{size}[ =](\d+)", given) for size in sizes)
    return math.prod(int(each[-1]) for each in found if each)


def of_hub(asked: Asked, user: Mapping[str, str]) -> dict[str, str]:
    """Variables with which names are looked up as in the environment of the user, in
    their cache and on their hub; if all models are folders, nobody is asked."""
    named = (found[1] or found[2] for found in NAMED.finditer(" ".join(asked.flags)))
    if all(Path(name).is_dir() for name in (asked.model, *named)):
        return {"HF_HUB_OFFLINE": "1"}
    caches = user.get("XDG_CACHE_HOME") or Path(user.get("HOME", "~"), ".cache")
    home = Path(user.get("HF_HOME") or Path(caches, "huggingface"))
    return {"HF_HOME": str(home.expanduser().absolute())}


def toml(value: object) -> str:
    return json.dumps(value)


def follow(
    order: Sequence[object],
    environment: Mapping[str, str],
    cwd: Path,
    log: Any,
    label: str,
) -> dict[str, Any] | None:
    """The result that a command prints; says meanwhile how far it is."""
    began = time.monotonic()
    told = None
    with subprocess.Popen(
        list(map(str, order)), env=dict(environment), cwd=cwd, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        try:
            for line in process.stdout:
                if line.startswith("PHASE "):
                    progress(f"{label}: {line[6:].strip()}", began)
                elif (result := read_result(line)) is not None:
                    told = result
                else:
                    log.write(line)
        except BaseException:
            process.terminate()
            raise
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return told


def progress(text: str, began: float) -> None:
    line = f"[{time.monotonic() - began:4.0f} s] {text}"
    end = "" if sys.stderr.isatty() else "\n"
    start = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{start}{line}", end=end, file=sys.stderr, flush=True)


def of_dummies(model: str) -> list[str]:
    """Flags of a start without weights and, if there is none, without a tokenizer."""
    # The user's are for another loader, and refused with dummies.
    flags = ["--load-format", "dummy", "--model-loader-extra-config", "{}"]
    folder = Path(model)
    if not folder.is_dir():
        return flags
    if not any(any(folder.glob(name)) for name in TOKENIZERS):
        flags.append("--skip-tokenizer-init")
    if not (folder / CONFIG).exists():  # vLLM finds it by its weights alone
        flags += ["--config-format", "mistral"]
    return flags


def about_memory(result: Mapping[str, Any]) -> bool:
    return (
        "requested" in result
        and bool(TOO_LITTLE.search(result["error"]))
        or ("ree memory on device" in result["error"])
    )


def plainly(error: str) -> str:
    """The one line of an error that names the fault."""
    error = re.sub(r"^\d+ validation errors? for \w+ (Value error, )?", "", error)
    error = error.partition(" [type=")[0]
    return f"vLLM refuses to start: {error[:600]}"


def why(result: Mapping[str, Any]) -> str:
    """The first sentence or two of vLLM's own words, if the weights are not it."""
    weights, requested = (result.get(key) or 0 for key in ("weights", "requested"))
    if weights > requested > 0:
        return (
            f"the weights of a card take {weights / GIB:.2f} GiB, more than the "
            f"{requested / GIB:.2f} GiB requested"
        )
    text = " ".join(str(result["error"]).split())
    text = text if len(text) < 300 else text[:297] + "..."
    if result.get("phase") == "weights" and weights:
        text = f"loading takes more than the {weights / GIB:.2f} GiB of weights: {text}"
    return text

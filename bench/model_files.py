"""The files of a model that vLLM reads how to start it from."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from scripts.commands import Problem

CONFIG = "config.json"
MISTRAL = "params.json"
# Of older checkpoints of ModelOpt, next to the config; vLLM reads it by this name.
SCHEME = "hf_quant_config"
QUANTIZATION = "quantization_config", "compression_config"


def name_of(file: Path) -> str:
    """The name by which vLLM reads a config.

    Raises:
        Problem: it is no model's config.
    """
    try:
        told = json.loads(file.read_text())
        if file.name == MISTRAL or "dim" in told and "model_type" not in told:
            return MISTRAL
        kind = told["model_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"{file}: no config of a model ({error!r}).") from error
    if not isinstance(kind, str):
        raise Problem(f"{file}: model_type is {kind!r}.")
    return CONFIG


def lay_out(file: Path, folder: Path) -> Path:
    """Make the folder of a model from NAME.json, and NAME.hf_quant_config.json if it
    is there."""
    folder.mkdir()
    shutil.copyfile(file, folder / name_of(file))
    scheme = scheme_of(file)
    if scheme.exists():
        shutil.copyfile(scheme, folder / f"{SCHEME}.json")
    return folder


def scheme_of(file: Path) -> Path:
    return file.with_name(f"{file.stem}.{SCHEME}.json")


def is_mistral(folder: Path) -> bool:
    """Whether vLLM reads params.json there, even next to a config.json."""
    weights = any(folder.glob("consolidated*.safetensors"))
    return weights and (folder / MISTRAL).exists()


def config_of(model: str) -> dict[str, Any]:
    """Empty: it is on the hub, or in Mistral's format."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads((Path(model) / CONFIG).read_text()))
    return {}


def quantized(model: str) -> bool:
    """Whether its files say so; True also if there are none."""
    config = config_of(model)
    parts = config, config.get("text_config") or {}
    said = any(name in part for part in parts for name in QUANTIZATION)
    return not config or said or (Path(model) / f"{SCHEME}.json").exists()

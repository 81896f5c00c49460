"""The configuration of a run: what may be set, defaults, profiles, checks.

One file, however long: a key, its default and its check change together."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import VgpuError

PROFILES = Path(__file__).parent / "profiles"
MAX_DEVICES = 16
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

CUDA_ERRORS = {
    "out_of_memory": 2,
    "invalid_value": 1,
    "not_permitted": 800,
    "not_supported": 801,
    "illegal_address": 700,
    "unknown": 999,
}
NVML_ERRORS = {
    "None": 0,
    "Uninitialized": 1,
    "InvalidArgument": 2,
    "NotSupported": 3,
    "NoPermission": 4,
    "NotFound": 6,
    "DriverNotLoaded": 9,
    "GpuIsLost": 15,
    "Unknown": 999,
}
NCCL_ERRORS = {
    "UnhandledCudaError": 1,
    "SystemError": 2,
    "InternalError": 3,
    "InvalidArgument": 4,
    "InvalidUsage": 5,
    "RemoteError": 6,
}


def parse_size(value: object, key: str = "size") -> int:
    """Bytes from a number or a text such as "23.5GiB" or "512 MiB".

    Raises VgpuError for anything else, and for negative or fractional bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise VgpuError(f"{key}: a size is needed (as 23.5GiB), not {value!r}")
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)", str(value).strip())
    if not match or match[2].lower() not in UNITS:
        raise VgpuError(
            f"{key}: {value!r} is no size; write bytes or a number with KiB, MiB, GiB, "
            "TiB (or KB, MB, GB, TB), as 23.5GiB"
        )
    size = float(match[1]) * UNITS[match[2].lower()]
    exact = (
        int(match[1]) * UNITS[match[2].lower()] if match[1].isdigit() else round(size)
    )
    if size < 0 or exact >= 2**60:
        raise VgpuError(f"{key}: {value!r} is out of range (0 to 1 EiB)")
    return exact


def _positive_size(value: object, key: str) -> int:
    size = parse_size(value, key)
    if size == 0:
        raise VgpuError(f"{key}: must be larger than 0")
    return size


def _block(value: object, key: str) -> int:
    size = _positive_size(value, key)
    if size < 512 or size & (size - 1):
        raise VgpuError(f"{key}: {value!r} must be a power of two of 512 bytes or more")
    return size


def _page_block(value: object, key: str) -> int:
    size = _block(value, key)
    if size < 4096:
        raise VgpuError(f"{key}: {value!r} must be 4 KiB or more")
    return size


def _integer(value: object, key: str) -> int:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError
        number = int(value)
    except ValueError:
        raise VgpuError(f"{key}: a whole number is needed, not {value!r}") from None
    if number < 0:
        raise VgpuError(f"{key}: {number} is negative")
    return number


def _flag(value: object, key: str) -> bool:
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "1", "yes", "on"):
        return True
    if str(value).lower() in ("false", "0", "no", "off"):
        return False
    raise VgpuError(f"{key}: true or false is needed, not {value!r}")


def _line(value: object, key: str) -> str:
    if not isinstance(value, str) or not value or "\n" in value:
        raise VgpuError(f"{key}: one line of text is needed, not {value!r}")
    return value


def _capability(value: object, key: str) -> str:
    text = str(value)
    if not re.fullmatch(r"\d{1,2}\.\d", text):
        raise VgpuError(f"{key}: {value!r} is no compute capability; write it as 9.0")
    return text


def _uuid(value: object, key: str) -> str:
    text = str(value)
    shape = r"(GPU|MIG)-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    if not re.fullmatch(shape, text):
        raise VgpuError(
            f"{key}: {value!r} is no UUID; write GPU- or MIG- and 8-4-4-4-12 "
            "hexadecimal digits"
        )
    return text


def _pci(value: object, key: str) -> str:
    text = str(value)
    if not re.fullmatch(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.\d", text):
        raise VgpuError(f"{key}: {value!r} is no PCI address; write it as 0000:01:00.0")
    return text


# What may be set for a device: how it is read, and its default (None: derived).
DEVICE_KEYS: dict[str, tuple[Callable[[object, str], Any], Any]] = {
    "memory": (_positive_size, "8GiB"),
    "meminfo_total": (_positive_size, None),
    "meminfo_free_limit": (parse_size, 0),
    "meminfo_free_stale": (_flag, False),
    "properties_total": (_positive_size, None),
    "nvml_total": (_positive_size, None),
    "nvml_own_use": (_flag, False),
    "mps": (_flag, False),
    "other": (parse_size, 0),
    "page_cache": (parse_size, 0),
    "context": (parse_size, 0),
    "graph": (parse_size, 0),
    "graph_node": (parse_size, 0),
    "first_graph": (parse_size, 0),
    "cublas_handle": (parse_size, 0),
    "module": (parse_size, 0),
    "kernel": (parse_size, 0),
    "local_memory": (_flag, False),
    "first_library": (parse_size, 0),
    "nccl_communicator": (parse_size, 0),
    "nccl_kernels": (parse_size, 0),
    "nccl_channels": (_integer, 0),
    "nccl_p2p_channels": (_integer, 0),
    "malloc_block": (_block, "2MiB"),
    "vmm_granularity": (_page_block, "2MiB"),
    "multicast_granularity": (parse_size, 0),
    "vmm_handle_offset": (_flag, True),
    "integrated": (_flag, False),
    "compute_capability": (_capability, "9.0"),
    "name": (_line, "Virtual GPU"),
    "sm_count": (_integer, 132),
    "clock_khz": (_integer, 1980000),
    "memory_clock_khz": (_integer, 3201000),
    "bus_bits": (_integer, 6144),
    "l2_bytes": (parse_size, "60MiB"),
    "shared_optin": (parse_size, 232448),
    "shared_per_sm": (parse_size, 233472),
    "uuid": (_uuid, None),
    "pci": (_pci, None),
    "mig_uuid": (_uuid, None),
    "mig_parent_total": (_positive_size, None),
}
NUMBERS = (
    "strict",
    "trace",
    "driver_version",
    "synchronize_us",
    "streams_behind",
    "behind_queries",
    "behind_us",
)
RUN_KEYS = (
    *NUMBERS,
    "profile",
    "devices",
    "device",
    "timeline",
    "report",
    "nvml",
    "nvml_errors",
    "inject",
    "moves",
    "hooks",
    "interpret",
)
INJECT_KEYS = ("call", "device", "nth", "over", "times", "error")
MOVE_KEYS = ("device", "bytes", "at_allocation", "at_phase")
HOOK_KEYS = (
    "kernel",
    "argument",
    "bytes",
    "value",
    "value_bytes",
    "value_argument",
    "count_argument",
    "per_block",
)


def _check_keys(given: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise VgpuError(
            f"unknown key {key!r} in {where}{hint} (known: {', '.join(sorted(known))})"
        )


def profiles() -> list[str]:
    return sorted(p.stem for p in PROFILES.glob("*.toml"))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise VgpuError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise VgpuError(f"{path} is no TOML: {error}") from None


def read_profile(name: str) -> dict[str, Any]:
    path = PROFILES / f"{name}.toml"
    if name not in profiles():
        near = difflib.get_close_matches(name.lower(), profiles(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise VgpuError(
            f"unknown profile {name!r}{hint} (known: {', '.join(profiles())})"
        )
    values = _read_toml(path)
    _check_keys(values, ["nvml_errors", *DEVICE_KEYS], f"profile {name}")
    return values


def signed_size(value: object, key: str) -> int:
    text = str(value).strip()
    return (
        -parse_size(text[1:], key) if text.startswith("-") else parse_size(value, key)
    )


def error_code(value: object, call: str) -> int:
    """The number of an error's name, in the family of the call."""
    families = {"nvml": NVML_ERRORS, "nccl": NCCL_ERRORS}
    names = families.get(call[:4], CUDA_ERRORS)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    for name, code in names.items():
        if str(value).lower().replace("_", "") == name.lower().replace("_", ""):
            return code
    raise VgpuError(
        f"unknown error {value!r} for {call}: write a number or one of "
        f"{', '.join(sorted(names))}"
    )


def default_error(call: str) -> str:
    """The error of an injected failure unless another is given."""
    defaults = {"nvml": "Unknown", "nccl": "SystemError"}
    return defaults.get(call[:4], "out_of_memory")


@dataclass
class Configuration:
    """A checked configuration, sizes in bytes."""

    devices: list[dict[str, Any]]
    run: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> str:
        """The text the library reads: lines "key value"."""
        out = [f"devices {len(self.devices)}"]
        for key in NUMBERS:
            out.append(f"{key} {int(self.run[key])}")
        for key in ("timeline", "report"):
            if self.run.get(key):
                out.append(f"{key} {self.run[key]}")
        for i, device in enumerate(self.devices):
            for key, value in device.items():
                value = int(value) if isinstance(value, bool) else value
                out.append(f"{i}.{key} {value}")
        for key in ("nvml_error", "inject", "move", "hook", "interpret"):
            out += [f"{key}.{i} {line}" for i, line in enumerate(self.run[key])]
        return "\n".join(out) + "\n"

    @property
    def nvml_absent(self) -> bool:
        return bool(self.run["nvml_absent"])


def _device(values: Mapping[str, Any], index: int) -> dict[str, Any]:
    given = {
        k: read(values[k], k) for k, (read, _) in DEVICE_KEYS.items() if k in values
    }
    device = {
        k: read(default, k)
        for k, (read, default) in DEVICE_KEYS.items()
        if default is not None
    }
    device |= given
    for key in ("meminfo_total", "properties_total", "nvml_total"):
        device.setdefault(key, device["memory"])
    device.setdefault("uuid", f"GPU-00000000-0000-0000-0000-{index:012x}")
    device.setdefault("pci", f"0000:{index + 1:02x}:00.0")
    if "mig_uuid" in device and not device["mig_uuid"].startswith("MIG-"):
        raise VgpuError(f"mig_uuid: {device['mig_uuid']!r} must begin with MIG-")
    device.setdefault("mig_parent_total", device["nvml_total"])
    if device["other"] > device["memory"]:
        raise VgpuError(
            f"other: {device['other']} bytes held by other processes are more than the "
            f"device's memory, {device['memory']}"
        )
    if device["page_cache"] and not device["integrated"]:
        raise VgpuError("page_cache: only an integrated device has its host's")
    major, minor = device.pop("compute_capability").split(".")
    return device | {"major": int(major), "minor": int(minor)}


def _entry(entry: object, keys: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(entry, Mapping):
        raise VgpuError(f"{where}: a table is needed, not {entry!r}")
    _check_keys(entry, keys, where)
    return dict(entry)


def _inject(entries: Sequence[object]) -> list[str]:
    lines = []
    for entry in entries:
        e = _entry(entry, INJECT_KEYS, "inject")
        if "call" not in e:
            raise VgpuError("inject: call is needed (as cuMemCreate)")
        call = _line(e["call"], "inject.call")
        error = error_code(e.get("error", default_error(call)), call)
        device = int(e.get("device", -1))
        nth = _integer(e.get("nth", 0), "inject.nth")
        over = parse_size(e.get("over", 0), "inject.over")
        times = _integer(e.get("times", 1), "inject.times")
        lines.append(f"{call} {device} {nth} {over} {times} {error}")
    return lines


def _moves(entries: Sequence[object], devices: int) -> list[str]:
    lines = []
    for entry in entries:
        e = _entry(entry, MOVE_KEYS, "moves")
        if "bytes" not in e or ("at_allocation" in e) == ("at_phase" in e):
            raise VgpuError(
                "moves: bytes and one of at_allocation and at_phase are needed"
            )
        device = _integer(e.get("device", 0), "moves.device")
        if device >= devices:
            raise VgpuError(f"moves.device: there is no device {device}")
        size = signed_size(e["bytes"], "moves.bytes")
        count = _integer(e.get("at_allocation", 0), "moves.at_allocation")
        lines.append(f"{device} {size} {count} {e.get('at_phase', '')}".rstrip())
    return lines


def _nvml_errors(table: Mapping[str, object], device: int = -1) -> list[str]:
    """Of calls about `device`; -1: of all calls."""
    lines = []
    for call, error in table.items():
        name, _, which = str(call).partition("@")
        if which not in ("", "parent", "device"):
            raise VgpuError(
                f"nvml_errors: {call!r}: write @parent or @device after a call"
            )
        parent = {"": -1, "device": 0, "parent": 1}[which]
        name = name if name.startswith("nvml") else "nvml*" if name == "all" else name
        if not name.startswith("nvml"):
            raise VgpuError(
                f"nvml_errors: {call!r} is no NVML call; write all or nvml..."
            )
        lines.append(f"{name} {device} {parent} {error_code(error, 'nvml')}")
    return lines


def _hooks(entries: Sequence[object]) -> list[str]:
    lines = []
    for entry in entries:
        e = _entry(entry, HOOK_KEYS, "hooks")
        for key in ("kernel", "argument"):
            if key not in e:
                raise VgpuError(f"hooks: {key} is needed")
        value_bytes = _integer(e.get("value_bytes", 4), "hooks.value_bytes")
        if value_bytes not in (1, 2, 4, 8):
            raise VgpuError(f"hooks.value_bytes: {value_bytes} must be 1, 2, 4 or 8")
        size = parse_size(e.get("bytes", value_bytes), "hooks.bytes")
        value = int(e.get("value", 0)) & (2 ** (8 * value_bytes) - 1)
        argument = _integer(e["argument"], "hooks.argument")
        value_from = int(e.get("value_argument", -1))
        count = int(e.get("count_argument", -1))
        kernel = _line(e["kernel"], "hooks.kernel")
        per_block = int(bool(e.get("per_block", False)))
        fields = argument, size, value, value_bytes, value_from, count, per_block
        lines.append(f"{kernel} {' '.join(map(str, fields))}")
    return lines


def _names(patterns: object, key: str) -> list[str]:
    if not isinstance(patterns, list):
        raise VgpuError(f"{key}: a list of patterns is needed, not {patterns!r}")
    return [_line(pattern, key) for pattern in patterns]


def _table(values: Mapping[str, Any], key: str) -> list[object]:
    entries = values.get(key, [])
    if not isinstance(entries, list):
        raise VgpuError(f"{key}: a list of tables is needed, not {entries!r}")
    return entries


def resolve(values: Mapping[str, Any]) -> Configuration:
    """Checks merged values and fills in derived ones. Raises VgpuError."""
    _check_keys(values, [*RUN_KEYS, *DEVICE_KEYS], "the configuration")
    count = _integer(values.get("devices", 1), "devices")
    if count > MAX_DEVICES:
        raise VgpuError(f"devices: {count} is more than {MAX_DEVICES}")
    each = values.get("device", {})
    if not isinstance(each, Mapping):
        raise VgpuError(f"device: tables [device.N] are needed, not {each!r}")
    for index, own in each.items():
        if not str(index).isdigit() or int(index) >= count:
            raise VgpuError(
                f"device.{index}: there are {count} devices, counted from 0"
            )
        if not isinstance(own, Mapping):
            raise VgpuError(f"device.{index}: a table is needed, not {own!r}")
        _check_keys(own, ["profile", *DEVICE_KEYS], f"device.{index}")
    common = {k: v for k, v in values.items() if k in DEVICE_KEYS}
    devices = []
    profile_errors: list[str] = []
    for index in range(count):
        own = dict(each.get(str(index), {}))
        profile = own.pop("profile", values.get("profile"))
        base = read_profile(_line(profile, "profile")) if profile is not None else {}
        profile_errors += _nvml_errors(base.pop("nvml_errors", {}), index)
        devices.append(_device({**base, **common, **own}, index))
    nvml = values.get("nvml", "present")
    if nvml not in ("present", "absent"):
        raise VgpuError(f"nvml: present or absent is needed, not {nvml!r}")
    own_errors = values.get("nvml_errors", {})
    if isinstance(own_errors, str):  # nvml_errors = "NoPermission": every call
        own_errors = {"all": own_errors}
    if not isinstance(own_errors, Mapping):
        raise VgpuError(
            f"nvml_errors: an error or a table from call to error is needed, "
            f"not {own_errors!r}"
        )
    run = {
        "strict": _flag(values.get("strict", False), "strict"),
        "trace": _flag(values.get("trace", False), "trace"),
        "driver_version": _integer(
            values.get("driver_version", 13000), "driver_version"
        ),
        "synchronize_us": _integer(values.get("synchronize_us", 0), "synchronize_us"),
        "streams_behind": _flag(values.get("streams_behind", False), "streams_behind"),
        "behind_queries": _integer(values.get("behind_queries", 16), "behind_queries"),
        "behind_us": _integer(values.get("behind_us", 0), "behind_us"),
        "nvml_absent": nvml == "absent",
        # The first that matches counts.
        "nvml_error": _nvml_errors(own_errors) + profile_errors,
        "inject": _inject(_table(values, "inject")),
        "move": _moves(_table(values, "moves"), count),
        "hook": _hooks(_table(values, "hooks")),
        "interpret": _names(values.get("interpret", []), "interpret"),
    }
    for key in ("timeline", "report"):
        if values.get(key):
            path = Path(_line(values[key], key)).resolve()
            if not path.parent.is_dir():
                raise VgpuError(f"{key}: the folder {path.parent} does not exist")
            run[key] = str(path)
    return Configuration(devices, run)


def set_value(values: dict[str, Any], setting: str) -> None:
    """Applies one KEY=VALUE; dots descend into tables, VALUE is TOML or text."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise VgpuError(f"--set {setting}: write KEY=VALUE")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    parts = key.strip().split(".")
    for part in parts[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise VgpuError(f"--set {setting}: {part} is no table")
    values[parts[-1]] = value


def load(
    path: Path | None = None,
    settings: Sequence[str] = (),
    **options: Any,
) -> Configuration:
    """A file, then options, then KEY=VALUE settings, the later over the earlier."""
    values = _read_toml(path) if path else {}
    values |= {k: v for k, v in options.items() if v is not None}
    for setting in settings:
        set_value(values, setting)
    return resolve(values)

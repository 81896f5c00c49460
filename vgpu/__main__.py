"""python -m vgpu [OPTIONS] -- COMMAND ... | build | profiles | timeline | control"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import build, config, launch
from .errors import VgpuError


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m vgpu",
        usage="python -m vgpu [OPTIONS] -- COMMAND ...",
        description="Run COMMAND on a virtual CUDA device. Kernels do nothing.",
        epilog="Other commands: build, profiles, timeline, control, bench (see --help "
        "of each).",
        allow_abbrev=False,
    )
    parser.add_argument("--memory", metavar="SIZE", help="device memory, as 23.5GiB")
    parser.add_argument("--profile", metavar="NAME", help="see: python -m vgpu profiles")
    parser.add_argument("--devices", metavar="N", help="number of devices")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument("--timeline", metavar="FILE", help="write changes of used bytes")
    parser.add_argument("--report", metavar="FILE", help="write a JSON line a process")
    parser.add_argument("--strict", action="store_true", default=None,
                        help="calls that are not implemented always fail")
    parser.add_argument("--run-dir", metavar="DIR", type=Path,
                        help="keep the run here, for python -m vgpu control DIR")
    options = list(arguments)
    if "--" not in options:
        parser.parse_args(options)
        parser.error("no COMMAND: write -- before it, as: "
                     "python -m vgpu --memory 8GiB -- python script.py")
    at = options.index("--")
    command = options[at + 1 :]
    given = parser.parse_args(options[:at])
    if not command:
        parser.error("no COMMAND after --")
    configuration = config.load(
        given.config,
        given.set,
        memory=given.memory,
        profile=given.profile,
        devices=given.devices,
        timeline=given.timeline,
        report=given.report,
        strict=given.strict,
    )
    return launch.run(configuration, command, folder=given.run_dir)


def _build(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vgpu build")
    parser.parse_args(arguments)
    print(build.ensure(quiet=False))
    return 0


def _profiles(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vgpu profiles")
    parser.parse_args(arguments)
    for name in config.profiles():
        device = config.load(profile=name).devices[0]
        print(f"{name:16} {device['memory'] / 2**30:8.2f} GiB  {device['name']}")
    return 0


COMMANDS = {"build": _build, "profiles": _profiles}


def main(arguments: Sequence[str]) -> int:
    try:
        if arguments and arguments[0] in COMMANDS:
            return COMMANDS[arguments[0]](arguments[1:])
        return _run(arguments)
    except VgpuError as error:
        print(f"vgpu: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

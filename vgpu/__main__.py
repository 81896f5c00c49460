"""python -m vgpu [OPTIONS] -- COMMAND ..., or one of the other commands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import bench, build, config, control, launch, timeline
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
    parser.add_argument(
        "--profile", metavar="NAME", help="see: python -m vgpu profiles"
    )
    parser.add_argument("--devices", metavar="N", help="number of devices")
    parser.add_argument("--config", metavar="FILE", type=Path, help="a TOML file")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[])
    parser.add_argument(
        "--timeline", metavar="FILE", help="write changes of used bytes"
    )
    parser.add_argument("--report", metavar="FILE", help="write a JSON line a process")
    parser.add_argument(
        "--strict",
        action="store_true",
        default=None,
        help="calls that are not implemented always fail",
    )
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=Path,
        help="keep the run here, for python -m vgpu control DIR",
    )
    options = list(arguments)
    if "--" not in options:
        parser.parse_args(options)
        parser.error(
            "no COMMAND: write -- before it, as: "
            "python -m vgpu --memory 8GiB -- python script.py"
        )
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


def _timeline(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vgpu timeline")
    parser.add_argument("file", type=Path, help="what --timeline wrote")
    parser.add_argument("--svg", type=Path, metavar="OUT.svg", help="draw it")
    given = parser.parse_args(arguments)
    events = timeline.read(given.file)
    if not events:
        raise VgpuError(f"{given.file} has no events")
    print(timeline.table(events))
    if given.svg:
        given.svg.write_text(timeline.svg(events))
    return 0


def _control(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m vgpu control")
    parser.add_argument("run", type=Path, help="the folder given as --run-dir")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("status")
    other = actions.add_parser("other", help="another process takes (or, -SIZE, gives)")
    other.add_argument("size")
    other.add_argument("--device", type=int, default=0)
    other.add_argument("--at-allocation", type=int, default=0, metavar="N")
    other.add_argument("--at-phase", default="", metavar="NAME")
    inject = actions.add_parser("inject", help="make calls fail")
    inject.add_argument("call")
    inject.add_argument("--device", type=int, default=-1)
    inject.add_argument("--nth", type=int, default=0)
    inject.add_argument("--over", default="0", metavar="SIZE")
    inject.add_argument("--times", type=int, default=1)
    inject.add_argument("--error")
    actions.add_parser("clear", help="no more injected failures")
    for action in ("begin", "end"):
        name = actions.add_parser(f"phase-{action}")
        name.add_argument("name")
    # argparse takes -1GiB for an option
    given = parser.parse_args(
        [f" {a}" if a[:1] == "-" and a[1:2].isdigit() else a for a in arguments]
    )
    if not (given.run / "state").exists():
        raise VgpuError(f"{given.run} is no run: start one with --run-dir {given.run}")
    control.attach(given.run)
    if given.action == "other":
        control.other_process(
            given.size.strip(),
            given.device,
            at_allocation=given.at_allocation,
            at_phase=given.at_phase,
        )
    elif given.action == "inject":
        control.inject(
            given.call,
            device=given.device,
            nth=given.nth,
            over=given.over,
            times=given.times,
            error=given.error,
        )
    elif given.action == "clear":
        control.clear_injections()
    elif given.action == "phase-begin":
        control.begin_phase(given.name)
    elif given.action == "phase-end":
        control.end_phase(given.name)
    for device in range(control.devices()):
        print(
            f"device {device}: memory {control.memory(device)} "
            f"used {control.used(device)} peak {control.peak(device)} "
            f"other {control.other(device)} available {control.available(device)}"
        )
    return 0


COMMANDS = {
    "build": _build,
    "profiles": _profiles,
    "timeline": _timeline,
    "control": _control,
    "bench": bench.main,
}


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

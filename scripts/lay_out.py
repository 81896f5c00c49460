"""Lay out the vLLM of a set, or of chosen topics, as links to the installed stock one.

Its files are those of the wheel that `make wheel SET=` builds, for PYTHONPATH, without
the wheel's gigabyte. Prints the folder, which stays until the series changes.
"""

from __future__ import annotations

import argparse
import shutil

from scripts import topics
from scripts.build_wheel import version_module
from scripts.commands import command, scratch
from scripts.patch_tests import overlay


def options(parser: argparse.ArgumentParser) -> None:
    topics.options(parser)


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    sets = args.root / "build/sets"
    target = sets / f"vllm-{base.local_version}"
    if not target.is_dir():
        name = base.set or "topics"
        with scratch(sets, name) as folder:
            made = topics.with_tree(base, folder)
            site = overlay(base, made.tree, folder / "site")
            version = site / "vllm/_version.py"
            official = version.read_bytes()
            version.unlink()  # a link
            version.write_bytes(version_module(official, base))
            for old in sets.glob(f"vllm-{base.version}+envelope.{name}.[0-9]*"):
                shutil.rmtree(old)
            site.rename(target)
    print(target)


if __name__ == "__main__":
    command(main)

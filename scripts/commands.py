"""What all commands share: options, errors, and files that are written atomically."""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
OUT_OF_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Problem(Exception):
    """An error that the user can fix: wanted, found, and the remedy."""


def command(main: Callable[[argparse.Namespace], None]) -> None:
    """Run a script's ``main`` with the common options and readable errors."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY)
    parser.add_argument("--base", default="0.33.0", help="vLLM release")
    getattr(sys.modules["__main__"], "options", lambda _: None)(parser)
    try:
        main(parser.parse_args())
    except Problem as problem:
        sys.exit(f"error: {problem}")
    except OSError as error:
        if error.errno not in OUT_OF_SPACE:
            raise
        where = error.filename or "the output folder"
        sys.exit(
            f"error: no space left while writing {where} ({error.strerror}). "
            "Nothing was replaced; free some space and run the command again."
        )
    except KeyboardInterrupt:
        sys.exit("error: interrupted. Nothing was replaced; run the command again.")


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One command at a time in a checkout.

    Raises:
        Problem: another command holds the lock.
    """
    (root / "build").mkdir(exist_ok=True)
    with (root / "build/lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Problem(
                f"another command is at work in {root}; wait for it to end."
            ) from None
        yield


@contextlib.contextmanager
def scratch(parent: Path, name: str) -> Iterator[Path]:
    """A folder next to its destination, gone afterwards whatever happens.

    Leftovers of runs that were killed are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for leftover in parent.glob(f".{name}.*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file, or make it, atomically."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.rename(path)

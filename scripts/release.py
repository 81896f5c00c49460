"""The supported releases, and what upstream published of them.

A release is a folder ``patches/v<version>`` with ``base.toml`` (what upstream
published, pinned by sha256), ``series`` (patch file names in order) and the
patches. Or ``base.toml`` names the release whose series it has: that is merged onto
it, with ``patches/resolutions``, and ``<topic>.diff`` beside ``base.toml`` is what a
topic needs there that no merge gives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.commands import Problem, scratch

if TYPE_CHECKING:
    from pypi_simple import PyPISimple


@dataclass(frozen=True)
class Artifact:
    """A published file and its sha256."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Extension:
    """A native extension that can be rebuilt without CUDA or torch."""

    member: str
    sources: tuple[str, ...]
    headers: tuple[str, ...]
    libraries: tuple[str, ...]
    limited_api: str


@dataclass(frozen=True)
class Base:
    """One supported release: ``patches/v<version>``."""

    root: Path
    version: str
    torch: str
    sdist: Artifact
    wheels: dict[str, Artifact]
    extensions: tuple[Extension, ...]
    tree: Path
    series: str = ""
    """The release whose series is merged onto this one; empty: it has its own."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Why this release lacks a topic of that series."""
    topics: tuple[str, ...] = ()
    """The chosen patches of the series, without ".patch"; empty for all."""
    set: str = ""
    """The name of the set that they are, if it is one."""

    @classmethod
    def load(cls, root: Path, version: str) -> Base:
        """Read ``base.toml``.

        Raises:
            Problem: the release is not supported, or its files are incomplete.
        """
        known = sorted(p.parent.name for p in root.glob("patches/v*/base.toml"))
        if f"v{version}" not in known:
            raise Problem(
                f"vLLM {version} is not a supported base. Supported: "
                f"{', '.join(name[1:] for name in known) or 'none'} (BASE=...)."
            )
        path = root / f"patches/v{version}/base.toml"
        try:
            data = tomllib.loads(path.read_text())
            return cls(
                root=root,
                version=data["version"],
                torch=data["torch"],
                sdist=Artifact(**data["sdist"]),
                wheels={a: Artifact(**w) for a, w in data["wheel"].items()},
                extensions=tuple(
                    Extension(
                        member,
                        tuple(e["sources"]),
                        tuple(e["headers"]),
                        tuple(e["libraries"]),
                        e["limited_api"],
                    )
                    for member, e in data.get("extension", {}).items()
                ),
                tree=root / (f"vllm-{version}" if "series" in data else "vllm"),
                series=data.get("series", ""),
                left_out=data.get("left_out", {}),
            )
        except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
            raise Problem(f"{path} is not a valid base: {error!r}") from error

    @property
    def folder(self) -> Path:
        return self.root / f"patches/v{self.version}"

    def wheel(self, arch: str) -> Artifact:
        if arch not in self.wheels:
            raise Problem(
                f"vLLM {self.version} has no wheel for {arch!r}. "
                f"Supported: {', '.join(sorted(self.wheels))} (ARCH=...)."
            )
        return self.wheels[arch]

    def patches(self) -> list[Path]:
        """The patch files in order.

        Raises:
            Problem: ``series`` names a file that is missing, or names one twice,
                or a patch file is not in ``series``; or base.toml leaves out or mends a
                topic that is not there.
        """
        folder = self.root / f"patches/v{self.series or self.version}"
        names = (folder / "series").read_text().split()
        present = {path.name for path in folder.glob("*.patch")}
        wrong = sorted(
            {n for n in names if names.count(n) > 1} | (set(names) ^ present)
        )
        if wrong:
            raise Problem(
                f"{folder / 'series'} and the patch files beside it differ: "
                f"{', '.join(wrong)}. Each patch file must be named once."
            )
        topics = {name.removesuffix(".patch") for name in names}
        mends = {path.stem for path in self.folder.glob("*.diff")}
        if unknown := sorted({*self.left_out, *mends} - topics):
            raise Problem(
                f"{self.folder} speaks of topics that {folder / 'series'} does not "
                f"have: {', '.join(unknown)}. Remove their *.diff or [left_out]."
            )
        return [
            path
            for name in names
            if (path := folder / name).stem not in self.left_out
            and (path.stem in self.topics or not self.topics)
        ]

    def mend(self, topic: str) -> Path:
        """What a topic needs on this release that no merge gives; it may be missing."""
        return self.folder / f"{topic}.diff"

    @property
    def resolutions(self) -> Path:
        """How conflicts with other releases were resolved."""
        return self.root / "patches/resolutions"

    def digest(self, resolved: bool = True) -> str:
        """sha256 over the pinned source and the patches in order, with all that a merge
        of them takes; ``resolved``: also with the resolutions of conflicts."""
        total = hashlib.sha256(self.sdist.sha256.encode())
        files = self.patches()
        if self.series:
            mends = [self.mend(patch.stem) for patch in files]
            files += [mend for mend in mends if mend.exists()]
            if resolved:
                files += sorted(p for p in self.resolutions.rglob("*") if p.is_file())
        for file in files:
            total.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return total.hexdigest()

    @property
    def local_version(self) -> str:
        """The version of our build: the set, the number of patches, and a hash of their
        content.

        "g" before the hash is for a set or the whole series, "t" for chosen topics.
        Without the hash pip keeps an installed build when another one has as many
        patches. Letters and digits with dots between: PEP 440 has no others.
        """
        name = f"{self.set}." if self.set else ""
        kind = "t" if self.topics and not self.set else "g"
        count = len(self.patches())
        return f"{self.version}+envelope.{name}{count}.{kind}{self.digest()[:8]}"

    @property
    def unpacked(self) -> Path:
        """Where `make envelope` unpacks our build; each set or topics has its own."""
        version = self.local_version if self.topics else self.version
        return self.root / f"build/envelope-{version}"


def releases(root: Path) -> list[str]:
    """The supported releases, the newest first."""
    found = [p.parent.name[1:] for p in root.glob("patches/v*/base.toml")]
    return sorted(found, key=lambda name: [*map(int, name.split("."))], reverse=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    return Path(
        os.environ.get("ENVELOPE_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "vllm-envelope"
    )


def fetch(artifact: Artifact, version: str) -> Path:
    """A published file, from the cache or the package index, hash-checked.

    The index is ``PIP_INDEX_URL`` where that is set; the cache is
    ``ENVELOPE_CACHE``, by default ``~/.cache/vllm-envelope``.

    Raises:
        Problem: no network, no such file, or a hash that does not match.
    """
    target = cache_folder() / artifact.sha256[:16] / artifact.file
    if target.is_file():
        if sha256(target) == artifact.sha256:
            return target
        target.unlink()

    print(f"fetching {artifact.file}", file=sys.stderr)
    with scratch(target.parent, artifact.file) as folder:
        part = folder / artifact.file
        advice = f", or put the file into {target.parent}"
        with package_index(f"fetch {artifact.file}", advice) as client:
            page = client.get_project_page("vllm", timeout=30)
            found = [p for p in page.packages if p.filename == artifact.file]
            if not found:
                raise Problem(
                    f"the package index has no {artifact.file} (vLLM {version}). "
                    "Check PIP_INDEX_URL."
                )
            download = partial(
                client.download_package, found[0], part, verify=False, timeout=60
            )
            persist(download)
        actual = sha256(part)
        if actual != artifact.sha256:
            raise Problem(
                f"{artifact.file} is not the file this series was made for: sha256 "
                f"{artifact.sha256} wanted, {actual} found. Do not use it; if "
                "upstream published a new file, base.toml must be reviewed."
            )
        part.rename(target)
    return target


def persist(download: Callable[[], None]) -> None:
    """Try thrice: a connection may break off within hundreds of MiB."""
    from requests.exceptions import ChunkedEncodingError, ConnectionError, Timeout

    for wait in 1, 4:
        try:
            return download()
        except (ChunkedEncodingError, ConnectionError, Timeout):
            time.sleep(wait)
    return download()


def published(version: str) -> list[Artifact]:
    """The files of a release on the package index, with their hashes.

    Raises:
        Problem: no network, or no such release.
    """
    with package_index(f"look up vLLM {version}") as client:
        page = client.get_project_page("vllm", timeout=30)
        found = [
            Artifact(package.filename, package.digests["sha256"])
            for package in page.packages
            if package.version == version and "sha256" in package.digests
        ]
    if not found:
        raise Problem(f"the package index has no vLLM {version}, or not its hashes.")
    return found


@contextlib.contextmanager
def package_index(what: str, advice: str = "") -> Iterator[PyPISimple]:
    from pypi_simple import PYPI_SIMPLE_ENDPOINT, NoSuchProjectError, PyPISimple
    from requests.exceptions import RequestException

    index = os.environ.get("PIP_INDEX_URL") or PYPI_SIMPLE_ENDPOINT
    try:
        with PyPISimple(endpoint=index) as client:
            yield client
    except (RequestException, NoSuchProjectError) as error:
        raise Problem(
            f"could not {what}: {error}. The network or the package index is out of "
            f"reach; try again{advice}."
        ) from error

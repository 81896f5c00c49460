"""An unpatched and a patched vLLM side by side, and scenarios run with either.

Needs only the standard library: a GPU machine may have little more than torch.

    python3 -m gpu.builds FILE.tar.xz FOLDER   # unpack a bundle: then --bundle FOLDER
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.scenarios.result import BEGINS, read_result
from bench.virtual import environment_of
from scripts import caches
from scripts.commands import REPOSITORY, Problem
from scripts.junit import chosen, outcomes
from scripts.release import Base

VLLMS = ("unpatched", "patched")
# No network, no probing for one, and nothing that the bundle leaves out.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
# NVML is asked for memory, even where a virtual device stands in for the GPU.
METERED = {"ENVELOPE_METER": "NVML"}


@dataclass(frozen=True)
class Builds:
    """Where the two are: a folder to put first on the path, or "" for the installed.

    `tests` holds vLLM's own `tests/`; `own_tests` are those of the series. `device`
    configures the virtual device that scenarios run on, instead of the GPU. Each has
    its own `caches`, empty at first, and both have Triton's kernels. `imported` are
    processes that wait for a scenario: see scenarios/imported.py.
    """

    python: str
    sites: dict[str, str]
    versions: dict[str, str]
    tests: Path
    own_tests: tuple[str, ...]
    caches: Path
    device: Path | None = None
    imported: dict[str, list[Conversation]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of_checkout(cls, base: Base, folder: Path) -> Builds:
        """The environment and the unpacked wheel of `make vgpu envelope`.

        Raises:
            Problem: they have not been made.
        """
        python, ours = environment_of(base)
        from scripts.patch_tests import tests_of_series

        return cls(
            str(python),
            {"unpatched": "", "patched": str(ours)},
            {"unpatched": base.version, "patched": base.local_version},
            base.tree,
            tuple(tests_of_series(base)),
            folder / "caches",
        )

    @classmethod
    def of_bundle(cls, archive: Path, folder: Path) -> Builds:
        """What bundle.py made, for the interpreter that runs this: unpacked into the
        folder, or where an earlier run of `gpu.builds` did that.

        Raises:
            Problem: it is no such file, or was made for another Python.
        """
        try:
            if not archive.is_dir():
                unpack(archive, folder)
            folder = archive if archive.is_dir() else folder
            manifest = json.loads((folder / "bundle.json").read_text())
        except (OSError, tarfile.TarError) as error:
            raise Problem(f"{archive} is no bundle of 'make bundle': {error}") from None
        if manifest["python"] != f"{sys.version_info[0]}.{sys.version_info[1]}":
            raise Problem(
                f"{archive.name} is for Python {manifest['python']}, this is "
                f"{sys.version.split()[0]}: 'make bundle PYTHON_VERSION=...'."
            )
        return cls(
            sys.executable,
            {"unpatched": str(folder / "unpatched"), "patched": str(folder / "both")},
            manifest["versions"],
            folder,
            tuple(manifest["own_tests"]),
            folder / "caches",
        )

    def on_device(self, configuration: Path) -> Builds:
        return dataclasses.replace(self, device=configuration)

    def environment(self, vllm: str, *more: Path) -> dict[str, str]:
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [
            self.sites[vllm],
            *map(str, more or (REPOSITORY,)),
            *(path for path in inherited if path != str(REPOSITORY)),
        ]
        own = {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            # Kernels by their source: what one compiled is ready for the other.
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
        }
        return caches.environment(os.environ, self.caches / vllm) | ENVIRONMENT | own

    def installed(self) -> dict[str, str]:
        """Versions of what results depend on."""
        script = (
            "import importlib.metadata as m, json, platform\n"
            "names = {d.name.lower() for d in m.distributions() if d.name}\n"
            "wanted = {'torch', 'triton', 'transformers'} & names\n"
            "print(json.dumps({'python': platform.python_version()}"
            " | {n: m.version(n) for n in sorted(wanted)}))"
        )
        done = subprocess.run(
            [self.python, "-c", script],
            env=self.environment("unpatched"),
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def run(
        self, module: str, arguments: list[str], vllm: str, folder: Path, limit: float
    ) -> dict[str, Any]:
        """A scenario's answer, or its "outcome" and "error" where it gives none."""
        with self.scenario(module, arguments, vllm, folder) as scenario:
            return scenario.answer(limit)

    def scenario(
        self, module: str, arguments: list[str], vllm: str, folder: Path
    ) -> Conversation:
        """Its process: one of those that wait for it, if there are any."""
        if waiting := self.imported.get(vllm):
            process = waiting.pop(0)
            process.tell([module, *arguments])
            return process
        return Conversation(self, ["-m", module, *arguments], vllm, folder)

    @contextlib.contextmanager
    def importing(self, numbers: dict[str, int], folder: Path) -> Iterator[Builds]:
        """With so many processes of each vLLM that import it, all at once, and wait.

        An import takes as long as a start. While something is timed none may run.
        """
        command = ["-m", "bench.scenarios.imported"]
        with contextlib.ExitStack() as stack:
            waiting: dict[str, list[Conversation]] = {}
            for vllm, number in numbers.items():
                for i in range(number):
                    own = folder / f"imported-{i}"
                    own.mkdir(exist_ok=True)
                    process = Conversation(self, command, vllm, own, imports=True)
                    stack.enter_context(process)
                    waiting.setdefault(vllm, []).append(process)
            yield dataclasses.replace(self, imported=waiting)

    def await_imports(self, limit: float) -> None:
        """Until no process imports any more."""
        end = time.monotonic() + limit
        for process in (p for waiting in self.imported.values() for p in waiting):
            process.await_import(end - time.monotonic())

    def run_own_tests(
        self, vllm: str, folder: Path, limit: float, *, until_one_fails: bool = False
    ) -> dict[str, Any]:
        """Outcomes of the series' own tests, by name, and the directories for which
        the time was too short.

        Each directory has a process, as in upstream's jobs: where a module that is
        imported makes a CUDA context, tests of others could not be forked.
        """
        end = time.monotonic() + limit
        shutil.copytree(
            self.tests / "tests", folder / "tests",
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip
        shutil.copy2(self.tests / "pyproject.toml", folder)
        directories: dict[str, list[str]] = {}
        for test in self.own_tests:
            directory = str(Path(test.partition("::")[0]).parent)
            directories.setdefault(directory, []).append(test)
        result: dict[str, Any] = {"outcome": "ran"}
        result |= {"passed": [], "failed": [], "skipped": [], "not run": []}
        for number, (directory, tests) in enumerate(directories.items()):
            if until_one_fails and result["failed"]:
                break
            report = folder / f"report{number}.xml"
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider",
                       f"--junitxml={report}", *["-x"] * until_one_fails,
                       *chosen(tests)]  # fmt: skip
            with Conversation(
                self, command, vllm, folder, folder / "tests/vllm_test_utils"
            ) as process:
                end_of_log = process.wait(end - time.monotonic())
            if not report.is_file():
                result["not run"].append(directory)
                continue
            found = list(outcomes(report))
            for name, outcome in found:
                result["failed" if outcome == "error" else outcome].append(name)
            if {"failed", "error"} & {outcome for _, outcome in found}:
                print(end_of_log, file=sys.stderr, flush=True)
        return result


def unpack(archive: Path, folder: Path) -> None:
    """Both vLLMs of a bundle, side by side."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    manifest = json.loads((folder / "bundle.json").read_text())
    unpatched, patched = folder / "unpatched", folder / "both"
    shutil.copytree(unpatched, patched, copy_function=os.link)
    for name in manifest["removed"]:
        (patched / name).unlink()
        # An empty dist-info would be a vLLM of no version.
        for parent in (patched / name).relative_to(patched).parents[:-1]:
            if not any((patched / parent).iterdir()):
                (patched / parent).rmdir()
    for file in (folder / "patched").rglob("*"):
        if file.is_file():
            target = patched / file.relative_to(folder / "patched")
            target.unlink(missing_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.rename(target)


class Conversation:
    """A scenario's process: takes orders, and answers with lines that begin with
    RESULT."""

    def __init__(
        self,
        builds: Builds,
        arguments: list[str],
        vllm: str,
        folder: Path,
        *paths: Path,
        imports: bool = False,
    ) -> None:
        self._imports = imports
        self._log = (folder / f"{vllm}.log").open("w+")
        environment = builds.environment(vllm, *paths)
        command = [builds.python, *arguments]
        if builds.device:
            command = [builds.python, "-m", "vgpu", "--config", str(builds.device),
                       "--", *command]  # fmt: skip
            environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
        else:
            environment |= METERED
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(BEGINS):
                self._lines.put(line)
            else:
                self._log.write(line)
        self._lines.put(None)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def ask(self, order: Any, limit: float) -> dict[str, Any]:
        self.tell(order)
        return self.answer(limit)

    def tell(self, order: Any) -> None:
        """A line of text, or what JSON has."""
        assert self._process.stdin
        line = order if isinstance(order, str) else json.dumps(order)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def await_import(self, limit: float) -> dict[str, Any]:
        if not self._imports:
            return {"outcome": "imported"}
        self._imports = False
        return self._answer(limit)

    def answer(self, limit: float) -> dict[str, Any]:
        end = time.monotonic() + limit
        imported = self.await_import(limit)
        if imported["outcome"] != "imported":
            return imported
        return self._answer(end - time.monotonic())

    def _answer(self, limit: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=max(limit, 0))
        except queue.Empty:
            line = None
            why = f"nothing within {limit:.0f} s"
        else:
            why = "it ended"
            if line is None:
                self._lines.put(None)  # for who asks again
        found = read_result(line) if line is not None else None
        if found is None:
            return {"outcome": "no result", "error": f"{why}\n{self._end_of_log()}"}
        return found

    def wait(self, limit: float) -> str:
        """The end of its output, once it has ended or the time is up."""
        with contextlib.suppress(queue.Empty):
            self._lines.get(timeout=max(limit, 0))
        return self._end_of_log()

    def _end_of_log(self) -> str:
        self._log.flush()
        return Path(self._log.name).read_text(errors="replace")[-2000:]


if __name__ == "__main__":
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))

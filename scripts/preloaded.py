"""Run commands on a virtual device, each forked from a process that has imported what
takes most of the time: all that vLLM's tests import, but vLLM itself.

Run by the interpreter that has PyTorch. Reads orders, a JSON object a line, and writes
a line for each: the exit status, or "no end".
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.commands import Problem
from vgpu import config
from vgpu.server import Server

IMPORTS = (
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "anthropic.types",
    "openai.types.responses",
    "transformers",
    "fastapi",
    "hypothesis",
    "pytest",
    "scripts.shared_triton_cache",
)


class Preloaded:
    """Such a process; one command at a time."""

    def __init__(self, python: Path, root: Path, memory: str) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "scripts.preloaded", memory],
            env=os.environ | {"PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        log: Path,
        timeout: float,
    ) -> None:
        """Run a module ("-m", name, argument, ...) with its output in a file.

        Raises:
            Problem: it was killed after `timeout` seconds, or could not be run.
        """
        order = {
            "command": list(command),
            "folder": str(folder),
            "environment": dict(environment),
            "log": str(log),
            "timeout": timeout,
        }
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer.lstrip("-").isdigit():
            said = log.read_text()[-2000:] if log.exists() else ""
            raise Problem(f"{' '.join(command[:2])}: {answer or 'ended'}\n{said}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def main(memory: str) -> None:
    device = config.load(memory=memory)
    server = Server(sys.executable, IMPORTS, os.environ, device)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            try:
                status: object = server.run(
                    device,
                    order["command"],
                    folder=Path(order["folder"]),
                    environment=order["environment"],
                    out=Path(order["log"]),
                    error=Path(order["log"] + ".errors"),
                    timeout=order["timeout"],
                )
            except TimeoutError:
                status = "no end"
            print(status, flush=True)
    finally:
        server.close()


if __name__ == "__main__":
    main(sys.argv[1])

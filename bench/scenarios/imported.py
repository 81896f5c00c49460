"""Import the modules of a start, say so, and run the command in stdin's first line.

The line is a JSON list: a scenario's module and its arguments.
"""

from __future__ import annotations

import importlib
import json
import sys

from bench.scenarios import serve, start_each


def main() -> None:
    start_each.import_vllm()
    serve.answer({"outcome": "imported"})
    module, *sys.argv[1:] = json.loads(sys.stdin.readline())
    importlib.import_module(module).main()


if __name__ == "__main__":
    main()

"""A hub of models, on this machine: the config of one model, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0" * 39 + "1"


@contextmanager
def hub(config: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Its address, and the paths that it is asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, with_body: bool) -> None:
            asked.append(self.path)
            path = self.path.partition("?")[0]
            told: object = {}
            found = path.startswith("/api/models/") or path.endswith("/config.json")
            if path.endswith("/config.json"):
                told = config
            elif "/tree/" in path:
                told = [{"type": "file", "path": "config.json", "size": 1, "oid": "1"}]
            elif found:
                files = [{"rfilename": "config.json"}]
                name = path.removeprefix("/api/models/")
                told = {"id": name, "sha": COMMIT, "siblings": files, "tags": []}
            body = json.dumps(told).encode()
            self.send_response(200 if found else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{COMMIT}"')
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "application/json")
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()

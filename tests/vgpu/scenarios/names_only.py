"""An executor of a library that sends the names of methods alone."""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class NamesOnly(MultiprocExecutor):  # type: ignore[misc]
    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(method, str):
            raise TypeError(f"a name is expected, got {method!r}")
        return super().collective_rpc(method, *args, **kwargs)

"""Do something before or after each call of a method, or of a module's function.

Every function of vLLM's that a bench watches is wrapped here: the patched build takes
one that is replaced without functools.wraps for a library's, and sizes the KV cache
early.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, functools.wraps(original)(wrapper(original)))


def before(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """`action` gets the positional arguments of the call, and the object itself."""

    def wrapper(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            action(*arguments)
            return original(*arguments, **options)

        return call

    wrap(owner, name, wrapper)


def after(owner: Any, name: str, action: Callable[..., Any]) -> None:
    """As before()."""

    def wrapper(original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            result = original(*arguments, **options)
            action(*arguments)
            return result

        return call

    wrap(owner, name, wrapper)

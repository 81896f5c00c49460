"""Keep imported objects out of Python's garbage collector.

A fork of a process that has imported vLLM would visit all of it at each collection, as
vLLM thaws its frozen objects. A start collects some twenty times.
"""

import gc

_freeze, _unfreeze = gc.freeze, gc.unfreeze


def freeze() -> None:
    """Until `keep_no_longer`, once `keep` was called."""
    gc.collect()
    _freeze()


def keep() -> None:
    """From now on nothing else freezes or thaws."""
    gc.freeze = gc.unfreeze = lambda: None


def keep_no_longer() -> None:
    """Freeze and thaw as an interpreter does."""
    gc.freeze, gc.unfreeze = _freeze, _unfreeze

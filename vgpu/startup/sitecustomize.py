"""Python imports this when it starts, in a run in which Triton kernels compute."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from vgpu import triton_launches

triton_launches.install()
# The one that this hides.
_paths = [path for path in sys.path if Path(path) != Path(__file__).parent]
_spec = PathFinder.find_spec(__name__, _paths)
if _spec and _spec.loader:
    sys.modules[__name__] = module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[__name__])

"""Scenarios: programs with an engine or an allocator, one per file, run by `python -m`.

Benches, tests and the GPU suite share them; those that tests alone run are in
tests/vgpu/scenarios. A scenario takes its case as JSON, and
prints its result as a line of JSON after "RESULT ".
"""

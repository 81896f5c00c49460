"""One story of an engine or an allocator a file, run as `python -m` in a process.

Benches, tests and the suite for GPUs share them. A scenario takes its case as JSON, and
prints what it found as a line of JSON after "RESULT ".
"""

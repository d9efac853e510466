"""The sections of `benchmarks/gpu_evidence.py`: each runs in a process of its own and reports row by row."""

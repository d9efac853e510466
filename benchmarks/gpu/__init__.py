"""Sections of `benchmarks/gpu_evidence.py`.  Each runs in a separate process and reports row by row."""

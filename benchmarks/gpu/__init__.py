"""Sections of `benchmarks/gpu_evidence.py`.  Each runs in a separate process and reports row by row."""


class Skipped(Exception):
    """Raised if the machine lacks something that a section needs; the message names it."""

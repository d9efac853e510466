"""Lifecycle of a run: checkpoints, hard resets, stages, validation, user requests and records."""

"""The life of a run: checkpoints, hard resets, stages, validation, requests to it, and what it records."""

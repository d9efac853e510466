"""Changes to NeMo, Megatron and torch without which they do not run, or run slowly, on a CPU."""

"""Changes to NeMo, Megatron and torch that let them run on a CPU, or run faster there."""

"""The policy: NeMo-Aligner's Megatron model under GRPO.  The only package that imports NeMo or Megatron.

| file | what it holds |
|---|---|
| `actor.py` | the model and the four things asked of it: log-probabilities, updates, weights, reference |
| `build.py` | from a configuration to a running actor, with NeMo-Aligner's own script utilities |
| `weights.py` | Hugging Face names and shapes <-> Megatron's, for any tensor and pipeline parallel size |
| `checkpoint_files.py` | exact checkpoints in Megatron's distributed format, complete when renamed |
| `cpu/` | what NeMo and Megatron need to run without CUDA, apex and Transformer Engine |
"""

"""The policy: NeMo-Aligner's Megatron model under GRPO.  The only package that imports NeMo or Megatron.

| file | content |
|---|---|
| `actor.py` | the model with log-probabilities, updates, weight export and the reference policy |
| `build.py` | builds an actor from a configuration with NeMo-Aligner's script utilities |
| `weights.py` | converts weights between Hugging Face and Megatron, for any tensor and pipeline parallel size |
| `checkpoint_files.py` | exact checkpoints in Megatron's distributed format; each gets its final name when complete |
| `cpu/` | changes that let NeMo and Megatron run without CUDA, apex and Transformer Engine |
"""

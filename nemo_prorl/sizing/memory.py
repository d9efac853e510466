"""Memory of a run by arithmetic: per GPU, per node and on disk, from the configuration alone.  No torch.

    memory = memory_of(cfg)                  # bytes by name
    memory_check.check_memory(cfg, 80e9)     # raises ConfigError where a GPU of 80 GB cannot hold it

Sizes are bytes; GB is 10^9 of them.  One GPU holds a trainer rank and at most one engine rank; with `rollout.sleep` the
engine's weights and KV cache leave it while the trainer works, and the trainer's state stays; with
`rollout.own_devices` it holds one of the two.  What is counted and what is assumed stands at each function.  Compared
with real models in tests/planning/test_memory.py: parameters with model files, a checkpoint with one on disk,
activations with what autograd keeps in the CPU actor; parameters, optimizer and FP8 copies of three larger shapes
with Megatron's own model on the meta device.  On GPUs it has not been measured.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.errors import ConfigError
from nemo_prorl.sizing.devices import smallest_gpu_bytes

GB = 1e9
FLOAT32 = 4
# Bytes of a GPU that no other part counts: assumed, not measured.  An engine's context and graphs remain in its sleep.
RESERVE_PARTS = {
    "two CUDA contexts": 12 * 10**8,
    "NCCL": 9 * 10**8,
    "CUDA graphs": 15 * 10**8,
    "workspaces of cuBLAS and Transformer Engine": 9 * 10**8,
    "fragmentation": 20 * 10**8,
}
RESERVE = sum(RESERVE_PARTS.values())
# On a CPU: Python with NeMo, vLLM's two processes and the reward server before any weights, and what malloc keeps;
# measured (benchmarks/half_billion.py).
CPU_RESERVE = 5 * 10**9
PUBLISHED_VERSIONS = 2  # alive in /dev/shm at a time (rollout.publication)
# Rows of the embedding where no folder says them: by layers, hidden and ffn size.
KNOWN_VOCABULARIES = {(28, 1536, 8960): (151_936, "DeepSeek-R1-Distill-Qwen-1.5B")}
MADE_VOCABULARY = 576  # the most that the tokenizer made for the data can have (data/laptop/model.py)
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True)
class ModelShape:
    """A Qwen2 or Llama: what its sizes follow from."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int  # key-value heads
    head_size: int
    vocab: int
    padded_vocab: int  # rows of Megatron's embedding
    tied: bool
    qkv_bias: bool

    @classmethod
    def of(cls, model: DictConfig, vocab: int) -> "ModelShape":
        divisor = model.make_vocab_size_divisible_by
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads,
            groups=model.num_query_groups,
            head_size=_optional(model, "kv_channels") or model.hidden_size // model.num_attention_heads,
            vocab=vocab,
            padded_vocab=-(-vocab // divisor) * divisor,
            tied=bool(_optional(model, "share_embeddings_and_output_weights")),
            qkv_bias=bool(_optional(model, "qkv_bias")),
        )

    @property
    def queries(self) -> int:
        """Width of all queries together, and of the attention's output."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Width of all keys together; of all values, too."""
        return self.groups * self.head_size


@dataclass(frozen=True)
class Layout:
    """The parallel layout of model and rows."""

    tp: int
    pp: int
    dp: int
    sequence_parallel: bool

    @classmethod
    def of(cls, cfg: DictConfig) -> "Layout":
        tp, pp = cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size
        ranks = cfg.trainer.num_nodes * cfg.trainer.devices
        return cls(tp, pp, max(1, ranks // (tp * pp)), bool(_optional(cfg.model, "sequence_parallel")))


@dataclass(frozen=True)
class Memory:
    """Bytes by name: of the fullest GPU (CPU: of its part of the host's memory), unless a comment says otherwise."""

    parameters: int  # a number: of the Hugging Face model
    weights: int
    gradients: int
    optimizer: int
    fp8_weights: int  # Transformer Engine's FP8 copies of the weights, which the trainer's passes make and drop
    reference_swap: int  # the reference's weights on the GPU, while they are in use
    activations: int  # that the fullest pipeline stage keeps for the backward pass
    layer_work: int  # tensors of one layer alive in its backward pass
    logits_forward: int
    logits_backward: int
    trainer_peak: int  # the most that the trainer holds at once
    trainer_resident: int  # what it holds while engines generate: weights, gradients, optimizer
    engine_weights: int
    engine_work: int
    kv_sequence: int  # KV cache of one sequence that fills the context
    kv_configured: int | None  # rollout.kv_cache_mb
    engines_sleep: bool  # rollout.sleep: not awake beside the trainer's work
    engines_apart: bool  # rollout.own_devices: on GPUs that nobody shares with them
    reserve: int  # for what is not counted here
    reference_host: int  # host memory of a node: the reference policy of its ranks
    snapshot_host: int  # host memory of a node while a checkpoint is written: the copy that is written
    published: int  # /dev/shm of a node
    checkpoint: int  # on disk, one
    checkpoints: int  # on disk, all that a run keeps and one that is being written

    @property
    def needed(self) -> int:
        """Return the least that a GPU must have: trainer, engine, KV cache (at least one sequence), reserve."""
        return max(self.while_training, self.while_generating)

    @property
    def while_generating(self) -> int:
        kv = self.kv_sequence if self.kv_configured is None else self.kv_configured
        return self._beside_engines + self.engine_weights + self.engine_work + kv + self.reserve

    @property
    def while_training(self) -> int:
        """Return the trainer's bytes; what a sleeping engine keeps (context, graphs) is in the reserve."""
        return self.trainer_peak + self.reserve

    @property
    def _beside_engines(self) -> int:
        """Return the trainer's bytes on an engine's GPU while the engine is awake."""
        if self.engines_apart:
            return 0
        return self.trainer_resident if self.engines_sleep else self.trainer_peak

    def kv_room(self, device_bytes: float | None) -> int | None:
        """Return the bytes for the KV cache: as configured, or what is left of the device; None if neither is known."""
        if self.kv_configured is not None or device_bytes is None:
            return self.kv_configured
        return max(0, int(device_bytes) - (self.while_generating - self.kv_sequence))

    def engine_bytes(self, device_bytes: float) -> int:
        """Return the bytes that an awake engine takes, without its part of the reserve."""
        return self.engine_weights + self.engine_work + (self.kv_room(device_bytes) or 0)

    def sequences(self, device_bytes: float | None) -> int | None:
        """Return how many sequences that fill the context fit into the KV cache of one engine."""
        room = self.kv_room(device_bytes)
        return None if room is None else room // self.kv_sequence

    def numbers(self) -> dict[str, int | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"needed": self.needed}


def vocabulary(cfg: DictConfig) -> tuple[int, str]:
    """(rows of the embedding, where that number is from): the model folder's config.json, or a named assumption."""
    given = cfg.pretrained_checkpoint.restore_from_path
    folder = Path(given) if given else Path(cfg.run_dir) / "init"
    file = folder / "config.json"
    if given or file.is_file():
        rows = json.loads(file.read_text()).get("vocab_size")
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            raise ConfigError(f"{file}: vocab_size={rows}: must be a whole number, at least 1")
        return rows, str(file)
    model = cfg.model
    known = KNOWN_VOCABULARIES.get((model.num_layers, model.hidden_size, model.ffn_hidden_size))
    if known:
        return known[0], f"assumed: {known[1]}'s, whose shape this is; no folder is given"
    return MADE_VOCABULARY, "assumed: the most that a tokenizer made for the data has"


def linear_weights(shape: ModelShape, tp: int = 1) -> int:
    """Count the weights of one layer's matrix products on one tensor rank, without biases: what FP8 applies to."""
    attention = shape.hidden * (shape.queries + 2 * shape.kv) + shape.queries * shape.hidden
    return (attention + 3 * shape.hidden * shape.ffn) // tp


def layer_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Count one layer on one tensor rank: q, k, v with their biases, output, gate, up, down; and both norms, whole."""
    biases = shape.queries + 2 * shape.kv if shape.qkv_bias else 0
    return linear_weights(shape, tp) + biases // tp + 2 * shape.hidden


def parameters(shape: ModelShape, padded: bool = False) -> int:
    """Count the whole model as Hugging Face does, or as Megatron with the padded vocabulary."""
    words = shape.padded_vocab if padded else shape.vocab
    embeddings = words * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer_parameters(shape) + shape.hidden + embeddings


def rank_parameters(shape: ModelShape, layout: Layout) -> int:
    """Count the fullest rank: a pipeline's first stage has the embedding, its last the output layer (tied: a copy)."""
    words = -(-shape.padded_vocab // layout.tp) * shape.hidden
    both_ends = layout.pp == 1 and not shape.tied
    layers = shape.layers // layout.pp * layer_parameters(shape, layout.tp)
    return layers + shape.hidden + words * (2 if both_ends else 1)


def weight_bytes(cfg: DictConfig) -> int:
    """Return the bytes of a weight in use, and of an activation: 2 under bf16, beside float32 masters."""
    return 2 if str(cfg.trainer.precision).startswith("bf16") else FLOAT32


def layer_activations(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Return the bytes that one layer keeps of a micro-batch of `tokens` tokens for its backward pass.

    Korthikanti et al. (arXiv 2205.05198, sec. 4) count the tensors of a GPT layer: s b h (34 + 5 a s / h) bytes, over t
    with tensor and sequence parallelism, without the 5 a s / h under selective recomputation (sec. 5).  The same count
    for Qwen2's layer (grouped queries, SwiGLU, no dropout), in elements a token, with q and k the widths of all queries
    and of all keys, f the ffn size:

        two norms                   4 h  in and out of each          CPU: 6 h, its norm keeps x / rms(x) too
        rotated queries, keys       q + k
        joined q, k, v              q + 2 k                          the values are a view of it, so it lives on
        attention's output          q
        gate and up, their product  2 f + f                          unfused: 4 f, silu(gate) is kept too
        log-sum-exp, 1 / rms        (heads + 2) float32

    Tensor parallelism divides all but the norms, sequence parallelism the norms too.  Attention is a flash kernel
    (Transformer Engine's, torch's on the CPU), which keeps no scores, so selective recomputation saves nothing more.
    On a GPU without Transformer Engine the scores are kept (heads x tokens each), unless recomputed selectively.
    """
    size, cpu = weight_bytes(cfg), cfg.trainer.accelerator == "cpu"
    norms = (6 if cpu else 4) * shape.hidden
    fused = _optional(cfg.model, "bias_activation_fusion")
    cut = 3 * shape.queries + 3 * shape.kv + (3 if fused else 4) * shape.ffn
    per_token = size * (norms / (layout.tp if layout.sequence_parallel else 1) + cut / layout.tp)
    per_token += FLOAT32 * (shape.heads / layout.tp + 2)
    selective = _optional(cfg.model, "activations_checkpoint_granularity") == "selective"
    if not cpu and not _optional(cfg.model, "transformer_engine") and not selective:
        per_token += size * shape.heads / layout.tp * cfg.trainer.grpo.context_tokens
    return int(tokens * per_token)


def stage_activations(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Return the bytes that the layers of one pipeline stage keep of one micro-batch.

    Full recomputation keeps the input of each recomputed piece and, while that piece runs again, its layers
    (arXiv 2205.05198, sec. 5): "uniform" pieces of activations_checkpoint_num_layers layers, or "block": that many
    layers are pieces of one, the others keep all.
    """
    layers = shape.layers // layout.pp
    full = layer_activations(cfg, shape, layout, tokens)
    if _optional(cfg.model, "activations_checkpoint_granularity") != "full":
        return layers * full
    entry = tokens * shape.hidden * weight_bytes(cfg) // (layout.tp if layout.sequence_parallel else 1)
    count = min(layers, _optional(cfg.model, "activations_checkpoint_num_layers") or 1)
    if _optional(cfg.model, "activations_checkpoint_method") == "block":
        return count * entry + (layers - count + 1) * full
    return -(-layers // count) * entry + count * full


def micro_batch_tokens(cfg: DictConfig) -> int:
    """Return the positions of the largest micro-batch: full rows, or model.micro_batch_tokens."""
    rows, budget = (
        cfg.model.micro_batch_size * cfg.trainer.grpo.context_tokens,
        _optional(cfg.model, "micro_batch_tokens"),
    )
    return int(rows if budget is None else min(rows, budget))


def logits_bytes(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> tuple[int, int]:
    """(forward, backward) bytes of `algorithms.logprobs`: logits of logprob_chunk_tokens rows x logprob_chunk_words.

    Forward: float32 logits, twice where entropies are wanted, as old and reference log-probabilities always want them.
    Backward: the logits' gradient in float32, twice with an entropy bonus and where it is compiled; and the gradients
    of hidden states, in float32, and of the whole output weight, in its own dtype.  16-bit models: float32 copies of
    the rows and words that are multiplied, and a float32 sum for one block of words.
    """
    grpo, size = cfg.trainer.grpo, weight_bytes(cfg)
    rows, all_words = min(grpo.logprob_chunk_tokens, tokens), -(-shape.padded_vocab // layout.tp)
    words, half = min(grpo.logprob_chunk_words, all_words), size < FLOAT32
    bonus = bool(grpo.entropy_coef) or bool(grpo.adaptive_entropy.enabled)
    copies = (rows + words) * shape.hidden * FLOAT32 if half else 0
    logits = rows * words * FLOAT32 * (2 if bonus or half else 1)
    sums = tokens * shape.hidden * FLOAT32 + all_words * shape.hidden * size
    sums += words * shape.hidden * FLOAT32 if half else 0
    return rows * words * 2 * FLOAT32 + copies, logits + copies + sums


def memory_of(cfg: DictConfig, vocab: int | None = None) -> Memory:
    """Return all sizes of a checked configuration; `vocab`: rows of the embedding, if the caller knows them.

    Weights in use and a float32 gradient of each (NeMo's grad_sync_dtype) on every rank; two float32 moments, and
    beside 16-bit weights a float32 master, spread over data-parallel ranks (Megatron's distributed optimizer).  With
    FP8, Transformer Engine keeps each layer's weights twice more, one byte each: as they are, and transposed.  The
    reference policy stays in host memory; while it is in use it lies on the GPU, too, beside the policy's own weights
    (`policy.actor`).  A checkpoint has both, float32 weights and moments; it is copied to host memory first, on rank 0
    with the whole weights once more (`policy.checkpoint_files`), but for what lies there already while a run waits for
    the write.  A pipeline's first stage keeps one micro-batch for each stage (arXiv 2205.05198, sec. 4.2.3); its last
    has the logits.
    """
    shape, layout = ModelShape.of(cfg.model, vocabulary(cfg)[0] if vocab is None else vocab), Layout.of(cfg)
    grpo, size = cfg.trainer.grpo, weight_bytes(cfg)
    mine, tokens = rank_parameters(shape, layout), micro_batch_tokens(cfg)
    master = FLOAT32 if size < FLOAT32 else 0
    grad = FLOAT32 if _optional(cfg.model, "optim.grad_sync_dtype") in (None, "fp32", 32) else size
    weights, gradients = mine * size, mine * grad
    optimizer = -(-mine * (2 * FLOAT32 + master) // layout.dp)
    fp8 = bool(_optional(cfg.model, "fp8"))
    fp8_weights = 2 * shape.layers // layout.pp * linear_weights(shape, layout.tp) * fp8
    resident = weights + gradients + optimizer

    one = stage_activations(cfg, shape, layout, tokens)
    ends = 3 * tokens * shape.hidden * size  # around the output layer: into the last norm, out of it, predicted rows
    rows = grpo.prompts_per_step // grpo.updates_per_step * grpo.samples_per_prompt
    in_one = (
        cfg.model.micro_batch_size if _optional(cfg.model, "micro_batch_tokens") is None else 1
    )  # of a budget's: one at least
    in_flight = min(layout.pp, max(1, rows // layout.dp // in_one))
    work = tokens * size * (2 * shape.hidden + 3 * shape.ffn // layout.tp)
    forward, backward = logits_bytes(cfg, shape, layout, tokens)
    updates = max(one * in_flight + work, one + ends + max(backward, work))
    cpu = cfg.trainer.accelerator == "cpu"
    swap = 0 if cpu else weights
    reference = swap + max(forward, work) + ends
    copied = not cpu or grpo.async_checkpoints
    checkpoint = parameters(shape, padded=True) * (2 * size + 3 * FLOAT32)
    return Memory(
        parameters=parameters(shape),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        fp8_weights=fp8_weights,
        reference_swap=swap,
        activations=max(one * in_flight, one + ends),
        layer_work=work,
        logits_forward=forward,
        logits_backward=backward,
        trainer_peak=resident + fp8_weights + max(updates, reference),
        trainer_resident=resident,
        **_engine(cfg, shape),
        reserve=CPU_RESERVE if cpu else RESERVE,
        reference_host=weights * cfg.trainer.devices,
        # the weights once, over the ranks of a model; each rank's part of the optimizer; on rank 0 all, to be hashed
        snapshot_host=(
            weights * min(layout.tp * layout.pp, cfg.trainer.devices)
            + optimizer * cfg.trainer.devices
            + parameters(shape) * size
        )
        * copied,
        published=PUBLISHED_VERSIONS * parameters(shape) * size,
        checkpoint=checkpoint,
        checkpoints=checkpoint * (_kept(grpo) + 1),
    )


def _engine(cfg: DictConfig, shape: ModelShape) -> dict[str, Any]:
    """A vLLM engine's rank: weights, KV cache (keys and values of each layer; a rank has one group at least), and work.

    Work is what its start-up run needs: one layer's tensors of the largest batch of tokens, and the sampler's float32
    logits, log-probabilities and probabilities of each sequence beside the logits themselves.
    """
    rollout, context = cfg.rollout, cfg.trainer.grpo.context_tokens
    tp, size = rollout.tensor_parallel_size, _SIZES.get(rollout.dtype, weight_bytes(cfg))
    batch = max(rollout.max_batched_tokens, context)  # as rollout.server asks for it
    work = batch * size * (4 * shape.hidden + 3 * shape.ffn // tp)
    head = max(size, FLOAT32) if cfg.trainer.grpo.float32_head else size
    work += rollout.max_num_seqs * shape.vocab * (head + 3 * FLOAT32)
    kv_mb = rollout.kv_cache_mb
    return {
        "engine_weights": -(-parameters(shape) * size // tp),
        "engine_work": work,
        "engines_sleep": rollout.sleep is not None and cfg.trainer.accelerator != "cpu",
        "engines_apart": rollout.own_devices and cfg.trainer.accelerator != "cpu",
        "kv_sequence": 2 * shape.layers * max(1, shape.groups // tp) * shape.head_size * size * context,
        "kv_configured": None if kv_mb is None else kv_mb * 2**20,
    }


def _kept(grpo: DictConfig) -> int:
    """Return how many checkpoints a run keeps: the newest and the best."""
    every = -(-grpo.max_steps // grpo.checkpoint_every) if grpo.checkpoint_every else 1
    keep = grpo.keep_checkpoints + grpo.keep_best if grpo.keep_checkpoints else every
    return int(min(keep, max(1, every)))


def micro_batch_words(cfg: DictConfig) -> str:
    """Return the key that limits a micro-batch, with its value."""
    size, budget = cfg.model.micro_batch_size, _optional(cfg.model, "micro_batch_tokens")
    if budget is not None and budget < size * cfg.trainer.grpo.context_tokens:
        return f"model.micro_batch_tokens={budget}"
    return f"model.micro_batch_size={size}"


def device_bytes(cfg: DictConfig) -> float | None:
    """Return a GPU's bytes: `rollout.device_memory_gb`, or where that is null what nvidia-smi reports on this machine.

    None on a CPU, and where nobody knows.
    """
    if cfg.trainer.accelerator == "cpu":
        return None
    gigabytes = OmegaConf.select(cfg, "rollout.device_memory_gb")
    return smallest_gpu_bytes() if gigabytes is None else float(gigabytes) * GB


def device_source(cfg: DictConfig) -> str:
    """Return where the number of `device_bytes` is from."""
    gigabytes = OmegaConf.select(cfg, "rollout.device_memory_gb")
    return "nvidia-smi" if gigabytes is None else f"rollout.device_memory_gb={gigabytes:g}"


def _optional(node: DictConfig, key: str) -> Any:
    """Return the value of a key of NeMo's; None if the configuration leaves it out."""
    return OmegaConf.select(node, key)

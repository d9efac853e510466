"""Memory that a run needs per GPU, per node and on disk, computed from the configuration alone.  No torch.

    memory = memory_of(cfg)                  # bytes by name
    memory_check.check_memory(cfg, 80e9)     # raises ConfigError if the run does not fit a GPU of 80 GB

Sizes are bytes; GB is 10^9 bytes.  One GPU has a trainer rank and at most one engine rank.  With `rollout.sleep` the
engine's weights and KV cache leave the GPU while the trainer works, and the trainer's state stays.  With
`rollout.own_devices` a GPU has either a trainer rank or an engine rank.  Each function's docstring lists its
assumptions.

tests/planning/test_memory.py compares the numbers with real models.  On a CPU: parameters with published models and a
model file, a checkpoint with the files that the actor writes, activations with the tensors that autograd keeps in the
actor.  On the meta device, with the actor in three larger shapes: its bytes in each phase
(benchmarks/memory_rehearsal.py).  The numbers have not been measured on GPUs.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_prorl.config import num_data_ranks
from nemo_prorl.data.hf_config import read_config, size_of
from nemo_prorl.sizing.devices import smallest_gpu_bytes
from nemo_prorl.sizing.phases import ASLEEP, AWAKE, PHASES, RESETTING, SAVING, phase_bytes
from nemo_prorl.sizing.widths import widest

GB = 1e9
FLOAT32 = 4
# Bytes on a GPU beside all other parts: assumed, not measured.  An engine's context and graphs stay while it sleeps.
RESERVE_PARTS = {
    "two CUDA contexts": 12 * 10**8,
    "NCCL": 20 * 10**8,  # communicators of all ranks, of the data ranks, and of these with context parallelism
    "CUDA graphs": 15 * 10**8,
    "workspaces of cuBLAS and Transformer Engine": 9 * 10**8,
    "fragmentation": 20 * 10**8,
}
RESERVE = sum(RESERVE_PARTS.values())
# Bytes on a CPU: Python with NeMo, vLLM's two processes and the reward server before any weights, and memory that
# malloc keeps; measured by benchmarks/half_billion.py.
CPU_RESERVE = 5 * 10**9
PUBLISHED_VERSIONS = 2  # versions of the weights in /dev/shm at a time (rollout.weight_store)
PIECE = 1 << 24  # elements that tensor or pipeline ranks exchange at a time, for tensors of the whole model
# (layers, hidden size, ffn size): (rows of the embedding, model), used if no model folder is given.
KNOWN_VOCABULARIES = {(28, 1536, 8960): (151_936, "DeepSeek-R1-Distill-Qwen-1.5B")}
MADE_VOCABULARY = 576  # largest vocabulary of a tokenizer made for the data (data/laptop/model.py)
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Qwen2, Qwen3 or Llama model."""

    layers: int
    hidden: int  # size of the hidden states
    ffn: int  # inner size of the feed-forward network
    heads: int  # query heads
    groups: int  # key-value heads, each shared by a group of query heads
    head_size: int
    vocab: int
    padded_vocab: int  # rows of Megatron's embedding
    tied: bool
    qkv_bias: bool
    qk_norm: bool = False

    @classmethod
    def of(cls, model: DictConfig, vocab: int) -> "ModelShape":
        divisor = model.make_vocab_size_divisible_by
        return cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            ffn=model.ffn_hidden_size,
            heads=model.num_attention_heads,
            groups=model.num_query_groups,
            head_size=model.get("kv_channels") or model.hidden_size // model.num_attention_heads,
            vocab=vocab,
            padded_vocab=-(-vocab // divisor) * divisor,
            tied=bool(model.get("share_embeddings_and_output_weights")),
            qkv_bias=bool(model.get("qkv_bias")),
            qk_norm=bool(model.get("qk_layernorm")),
        )

    @property
    def queries(self) -> int:
        """Return the width of all queries together, which is also the width of the attention's output."""
        return self.heads * self.head_size

    @property
    def kv(self) -> int:
        """Return the width of all keys together, which is also the width of all values together."""
        return self.groups * self.head_size


@dataclass(frozen=True)
class Layout:
    """The parallel layout: tensor, pipeline and data parallel size, and sequence parallelism."""

    tp: int
    pp: int
    dp: int
    sequence_parallel: bool

    @classmethod
    def of(cls, cfg: DictConfig) -> "Layout":
        tp, pp = cfg.model.tensor_model_parallel_size, cfg.model.pipeline_model_parallel_size
        return cls(tp, pp, max(1, num_data_ranks(cfg)), bool(cfg.model.get("sequence_parallel")))


@dataclass(frozen=True)
class Memory:
    """Memory and disk space that a run needs.

    Most fields are bytes on the fullest GPU (on a CPU: bytes of one rank's share of host memory).  The comment at a
    field names any other place or unit.
    """

    parameters: int  # a count, not bytes: the parameters of the Hugging Face model
    weights: int
    gradients: int
    optimizer: int  # moments, and for 16-bit weights the float32 master weights
    fp8_weights: int  # Transformer Engine's FP8 copies of the weights, made and dropped in each pass
    reference_swap: int  # the reference's weights on the GPU while they are in use
    activations: int  # kept by the fullest pipeline stage for the backward pass
    layer_work: int  # tensors of one layer alive in its backward pass
    logits_forward: int
    logits_backward: int
    logprobs_work: int  # beside what stays, in a pass without gradients
    update_work: int  # beside what stays and the FP8 copies, in an update
    trainer_peak: int  # largest use by the trainer at a time
    trainer_resident: int  # weights, gradients and optimizer, which stay while engines generate
    gathered: int  # pieces of weights that tensor and pipeline ranks exchange to put whole tensors together
    engine_weights: int
    engine_work: int
    kv_sequence: int  # KV cache of one sequence that fills the context
    kv_configured: int | None  # rollout.kv_cache_mb in bytes
    engines_sleep: bool  # rollout.sleep: engines sleep while the trainer works
    engines_apart: bool  # rollout.own_devices: engines have separate GPUs
    reserve: int  # assumed sum of the uses that no other field counts (RESERVE_PARTS)
    reference_host: int  # host memory per node: the reference policy of its ranks, page-locked beside GPUs
    snapshot_host: int  # host memory per node while a checkpoint is written: the copy from which it is written
    published: int  # in /dev/shm of a node: the published weights for the engines, PUBLISHED_VERSIONS versions
    checkpoint: int  # size of a checkpoint on disk
    checkpoints: int  # on disk: all checkpoints that a run keeps, and the one that is being written

    @property
    def kv_planned(self) -> int:
        """Return the bytes of the KV cache: as configured, otherwise one sequence that fills the context."""
        return self.kv_sequence if self.kv_configured is None else self.kv_configured

    @property
    def needed(self) -> int:
        """Return the bytes that a GPU must have for trainer, engine, KV cache (one sequence at least) and reserve."""
        return max(phase_bytes(self).values())

    @property
    def while_generating(self) -> int:
        """Return the largest sum of a phase in which the engine has its KV cache."""
        sums = phase_bytes(self)
        engine = (AWAKE, SAVING, RESETTING) if self.engines_sleep or self.engines_apart else PHASES
        return max(sums[phase] for phase in engine)

    @property
    def while_training(self) -> int:
        """Return the sum while the trainer works; a sleeping engine's context is in the reserve."""
        return phase_bytes(self)[ASLEEP]

    def kv_room(self, device_bytes: float | None) -> int | None:
        """Return the bytes of the KV cache: as configured, otherwise all that the device has left; None if unknown."""
        if self.kv_configured is not None or device_bytes is None:
            return self.kv_configured
        return max(0, int(device_bytes) - (self.while_generating - self.kv_sequence))

    def engine_bytes(self, device_bytes: float) -> int:
        """Return the GPU memory of an awake engine in bytes, without its part of `reserve`."""
        return self.engine_weights + self.engine_work + (self.kv_room(device_bytes) or 0)

    def sequences(self, device_bytes: float | None) -> int | None:
        """Return how many sequences of full context length one engine's KV cache can hold; None if unknown."""
        room = self.kv_room(device_bytes)
        return None if room is None else room // self.kv_sequence

    def numbers(self) -> dict[str, int | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"needed": self.needed}


def vocabulary(cfg: DictConfig) -> tuple[int, str]:
    """Return (rows of the embedding, source of this number): the source is config.json or a named assumption."""
    path = cfg.pretrained_checkpoint.restore_from_path
    folder = Path(path) if path else Path(cfg.run_dir) / "init"
    file = folder / "config.json"
    if path or file.is_file():
        return size_of(read_config(folder), "vocab_size", str(file)), str(file)
    model = cfg.model
    known = KNOWN_VOCABULARIES.get((model.num_layers, model.hidden_size, model.ffn_hidden_size))
    if known:
        return known[0], f"assumed: {known[1]}'s, whose shape this is; no folder is given"
    return MADE_VOCABULARY, "assumed: the largest vocabulary of a tokenizer made for the data"


def linear_weights(shape: ModelShape, tp: int = 1) -> int:
    """Count the weights of one layer's matrix products on one tensor rank, without biases; FP8 applies to these."""
    attention = shape.hidden * (shape.queries + 2 * shape.kv) + shape.queries * shape.hidden
    return (attention + 3 * shape.hidden * shape.ffn) // tp


def layer_parameters(shape: ModelShape, tp: int = 1) -> int:
    """Count one layer's parameters on one tensor rank: its part of weights and biases, and all norms in full."""
    biases = shape.queries + 2 * shape.kv if shape.qkv_bias else 0
    norms = 2 * shape.hidden + (2 * shape.head_size if shape.qk_norm else 0)
    return linear_weights(shape, tp) + biases // tp + norms


def parameters(shape: ModelShape, padded: bool = False) -> int:
    """Count the parameters of the whole model; `padded`: with the vocabulary size as Megatron pads it."""
    words = shape.padded_vocab if padded else shape.vocab
    embeddings = words * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer_parameters(shape) + shape.hidden + embeddings


SMALL = 20_000_000  # parameters


def is_small(cfg: DictConfig) -> bool:
    """Return whether the model has fewer than 20 million parameters: too few to have been pretrained on language."""
    return parameters(ModelShape.of(cfg.model, vocabulary(cfg)[0])) < SMALL


def rank_tensors(shape: ModelShape, layout: Layout) -> list[int]:
    """Return the number of elements of each parameter of the rank that has the most.

    The first pipeline stage has the embedding; the last stage has the output layer (tied: a copy of the embedding).
    """
    qkv = shape.queries + 2 * shape.kv
    cut = [qkv * shape.hidden, shape.queries * shape.hidden, 2 * shape.ffn * shape.hidden, shape.ffn * shape.hidden]
    cut += [qkv] if shape.qkv_bias else []
    words = -(-shape.padded_vocab // layout.tp) * shape.hidden
    ends = 2 if layout.pp == 1 and not shape.tied else 1
    layer = [count // layout.tp for count in cut] + [shape.hidden] * 2 + [shape.head_size] * 2 * shape.qk_norm
    return shape.layers // layout.pp * layer + [shape.hidden] + ends * [words]


def weight_bytes(cfg: DictConfig) -> int:
    """Return the bytes per weight and per element of activations: 2 with bf16, otherwise 4.

    Does not apply to the optimizer's master weights, which always have 4 bytes each.
    """
    return 2 if str(cfg.trainer.precision).startswith("bf16") else FLOAT32


def layer_activations(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Return the bytes that one layer keeps of a micro-batch of `tokens` tokens for its backward pass.

    Korthikanti et al. (arXiv 2205.05198, sec. 4) count the tensors of a GPT layer: s b h (34 + 5 a s / h) bytes, with
    sequence length s, micro-batch size b, hidden size h and number of heads a.  Tensor and sequence parallelism of
    size t divide this by t; selective recomputation removes 5 a s / h (sec. 5).  The same count for Qwen2's layer
    (grouped queries, SwiGLU, no dropout) follows, in elements per token; q and k are the widths of all queries and of
    all keys, f is the ffn size:

        two norms                   4 h  in and out of each          CPU: 6 h, the norm also keeps x / rms(x)
        rotated queries, keys       q + k
        joined q, k, v              q + 2 k                          kept because the values are a view of it
        attention's output          q
        gate and up, their product  2 f + f                          unfused: 4 f, silu(gate) is also kept
        log-sum-exp, 1 / rms        (heads + 2) float32

    Tensor parallelism divides all but the norms; sequence parallelism also divides the norms.  Attention is a flash
    kernel (Transformer Engine's, on the CPU torch's) that keeps no scores, so selective recomputation saves nothing.
    On a GPU without Transformer Engine the scores are kept (heads x tokens each), unless recomputed selectively.
    """
    size, cpu = weight_bytes(cfg), cfg.trainer.accelerator == "cpu"
    norms = (6 if cpu else 4) * shape.hidden
    fused = cfg.model.get("bias_activation_fusion")
    cut = 3 * shape.queries + 3 * shape.kv + (3 if fused else 4) * shape.ffn
    per_token = size * (norms / (layout.tp if layout.sequence_parallel else 1) + cut / layout.tp)
    per_token += FLOAT32 * (shape.heads / layout.tp + 2)
    selective = cfg.model.get("activations_checkpoint_granularity") == "selective"
    if not cpu and not cfg.model.get("transformer_engine") and not selective:
        per_token += size * shape.heads / layout.tp * cfg.trainer.grpo.context_tokens
    return int(tokens * per_token)


def stage_activations(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> int:
    """Return the bytes that the layers of one pipeline stage keep of one micro-batch.

    Full recomputation divides the layers into pieces (arXiv 2205.05198, sec. 5).  It keeps the input of each piece;
    while a piece is recomputed, it also keeps all activations of the layers in this piece.  With
    activations_checkpoint_method "uniform", each piece has activations_checkpoint_num_layers layers.  With "block",
    activations_checkpoint_num_layers is the number of recomputed layers, each of which is a piece; the other layers
    keep all their activations.
    """
    layers = shape.layers // layout.pp
    full = layer_activations(cfg, shape, layout, tokens)
    if cfg.model.get("activations_checkpoint_granularity") != "full":
        return layers * full
    entry = tokens * shape.hidden * weight_bytes(cfg) // (layout.tp if layout.sequence_parallel else 1)
    count = min(layers, cfg.model.get("activations_checkpoint_num_layers") or 1)
    if cfg.model.get("activations_checkpoint_method") == "block":
        return count * entry + (layers - count + 1) * full
    return -(-layers // count) * entry + count * full


def micro_batch_tokens(cfg: DictConfig) -> int:
    """Return the tokens of the largest micro-batch: rows of full context length, at most model.micro_batch_tokens.

    A single row that is wider than this budget, because of its padding, is a micro-batch of its own.
    """
    width, budget = widest(cfg.model, cfg.trainer.grpo.context_tokens), cfg.model.get("micro_batch_tokens")
    rows = cfg.model.micro_batch_size * width
    return int(rows if budget is None else max(width, min(rows, budget)))


def logits_bytes(cfg: DictConfig, shape: ModelShape, layout: Layout, tokens: int) -> tuple[int, int]:
    """Return (forward, backward) bytes that `algorithms.logprobs` needs for logits, in addition to the model's bytes.

    The logits are computed in chunks of logprob_chunk_tokens tokens x logprob_chunk_words vocabulary entries.
    Forward: two float32 tensors of a chunk's logits, as the entropy needs.  Backward: the gradient of a chunk's logits
    in float32 (two tensors with an entropy bonus or in compiled code), the gradient of the hidden states in float32,
    and the gradient of the whole output weight in the weight's dtype.  16-bit models add float32 copies of the chunk's
    hidden states and output weights, and in the backward pass a float32 sum for the chunk's output weights.
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
    """Return the memory and disk space that a run with a checked configuration needs.

    Every rank has the weights in use and their gradients (in NeMo's grad_sync_dtype, usually float32).  Two float32
    moments, and for 16-bit weights a float32 master, are spread over data-parallel ranks (Megatron's distributed
    optimizer).  With FP8, Transformer Engine keeps two more copies of each layer's weights, one byte per weight: plain
    and transposed.  The reference policy stays in page-locked host memory, for which PyTorch takes a power of two per
    tensor; while it is in use, its weights are beside the policy's on the GPU (`device.exchanged`).

    A checkpoint has the weights of policy and reference, float32 master weights and moments.  Before a checkpoint is
    written, the ranks copy their tensors to host memory, and rank 0 also copies the whole weights
    (`policy.checkpoint_files`).  On a CPU, these copies are made only if checkpoints are written in the background.  A
    pipeline's first stage keeps the activations of as many micro-batches as there are stages (arXiv 2205.05198,
    sec. 4.2.3); the last stage has the logits.

    Args:
        vocab: rows of the embedding; None: as returned by `vocabulary`.
    """
    shape, layout = ModelShape.of(cfg.model, vocabulary(cfg)[0] if vocab is None else vocab), Layout.of(cfg)
    grpo, size = cfg.trainer.grpo, weight_bytes(cfg)
    count, tokens = sum(rank_tensors(shape, layout)), micro_batch_tokens(cfg)
    master = FLOAT32 if size < FLOAT32 else 0
    grad = FLOAT32 if OmegaConf.select(cfg.model, "optim.grad_sync_dtype") in (None, "fp32", 32) else size
    weights, gradients = count * size, count * grad
    optimizer = -(-count * (2 * FLOAT32 + master) // layout.dp)
    fp8 = bool(cfg.model.get("fp8"))
    fp8_weights = 2 * shape.layers // layout.pp * linear_weights(shape, layout.tp) * fp8
    resident = weights + gradients + optimizer

    activations = stage_activations(cfg, shape, layout, tokens)
    ends = 3 * tokens * shape.hidden * size  # input and output of the last norm, and the rows that predict tokens
    rows = grpo.prompts_per_step // grpo.updates_per_step * grpo.samples_per_prompt
    # A token budget allows at least one row per micro-batch.
    in_one = cfg.model.micro_batch_size if cfg.model.get("micro_batch_tokens") is None else 1
    in_flight = min(layout.pp, max(1, rows // layout.dp // in_one))
    work = tokens * size * (2 * shape.hidden + 3 * shape.ffn // layout.tp)
    # A layer without gradients: gate, up, their product (unfused: and silu(gate)), and four tensors of the hidden size.
    widths = (3 if cfg.model.get("bias_activation_fusion") else 4) * shape.ffn // layout.tp
    passing = tokens * size * (4 * shape.hidden // (layout.tp if layout.sequence_parallel else 1) + widths)
    forward, backward = logits_bytes(cfg, shape, layout, tokens)
    updates = max(activations * in_flight + work, activations + ends + max(backward, work))
    cpu = cfg.trainer.accelerator == "cpu"
    swap = 0 if cpu else weights
    logprobs = max(forward + ends, passing)
    host = weights if cpu else sum(1 << (size * elements - 1).bit_length() for elements in rank_tensors(shape, layout))
    copied = not cpu or grpo.async_checkpoints
    checkpoint = parameters(shape, padded=True) * (2 * size + 3 * FLOAT32)
    return Memory(
        parameters=parameters(shape),
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        fp8_weights=fp8_weights,
        reference_swap=swap,
        activations=max(activations * in_flight, activations + ends),
        layer_work=work,
        logits_forward=forward,
        logits_backward=backward,
        logprobs_work=logprobs,
        update_work=updates,
        trainer_peak=resident + fp8_weights + max(updates, swap + logprobs),
        trainer_resident=resident,
        gathered=0 if cpu or layout.tp * layout.pp == 1 else (layout.tp + 1) * PIECE * size,
        **_engine(cfg, shape),
        reserve=CPU_RESERVE if cpu else RESERVE,
        reference_host=host * cfg.trainer.devices,
        # The ranks of a model copy the weights once, each rank its optimizer part, rank 0 all weights to hash them.
        snapshot_host=(
            host * min(layout.tp * layout.pp, cfg.trainer.devices)
            + optimizer * cfg.trainer.devices
            + parameters(shape) * size
        )
        * copied,
        published=PUBLISHED_VERSIONS * parameters(shape) * size,
        checkpoint=checkpoint,
        checkpoints=checkpoint * (_kept(grpo) + 1),
    )


def _engine(cfg: DictConfig, shape: ModelShape) -> dict[str, Any]:
    """Return the sizes of one rank of a vLLM engine: weights, work and KV cache.

    Work is what the engine's start-up run allocates: one layer's tensors for the largest batch of tokens; the logits of
    each sequence; and the sampler's float32 logits, log-probabilities and probabilities.  The KV cache has keys and
    values of each layer; a rank has at least one key-value group.
    """
    rollout, context = cfg.rollout, cfg.trainer.grpo.context_tokens
    tp, size = rollout.tensor_parallel_size, _SIZES.get(rollout.dtype, weight_bytes(cfg))
    batch = max(rollout.max_batched_tokens, context)  # same value as rollout.engine.setup passes to vLLM
    work = batch * size * (4 * shape.hidden + 3 * shape.ffn // tp)
    head = max(size, FLOAT32) if cfg.trainer.grpo.float32_head else size
    work += rollout.max_num_seqs * shape.vocab * (head + 3 * FLOAT32)
    return {
        "engine_weights": -(-parameters(shape) * size // tp),
        "engine_work": work,
        "engines_sleep": rollout.sleep is not None and cfg.trainer.accelerator != "cpu",
        "engines_apart": rollout.own_devices and cfg.trainer.accelerator != "cpu",
        "kv_sequence": 2 * shape.layers * max(1, shape.groups // tp) * shape.head_size * size * context,
        "kv_configured": None if rollout.kv_cache_mb is None else rollout.kv_cache_mb * 2**20,
    }


def _kept(grpo: DictConfig) -> int:
    """Return how many checkpoints a run keeps, newest and best together."""
    every = -(-grpo.max_steps // grpo.checkpoint_every) if grpo.checkpoint_every else 1
    keep = grpo.keep_checkpoints + grpo.keep_best if grpo.keep_checkpoints else every
    return int(min(keep, max(1, every)))


def micro_batch_words(cfg: DictConfig) -> str:
    """Return a text for messages: the key that limits the size of a micro-batch, with its value."""
    size, budget = cfg.model.micro_batch_size, cfg.model.get("micro_batch_tokens")
    if budget is not None and budget < size * cfg.trainer.grpo.context_tokens:
        return f"model.micro_batch_tokens={budget}"
    return f"model.micro_batch_size={size}"


def device_bytes(cfg: DictConfig) -> float | None:
    """Return a GPU's bytes: `rollout.device_memory_gb`, or if null what CUDA reports on this machine.

    None on a CPU, or if CUDA reports no GPU.
    """
    if cfg.trainer.accelerator == "cpu":
        return None
    gigabytes = cfg.rollout.device_memory_gb
    return smallest_gpu_bytes() if gigabytes is None else float(gigabytes) * GB


def device_source(cfg: DictConfig) -> str:
    """Return the source of the number in `device_bytes`, as text: CUDA, or a key with its value."""
    gigabytes = cfg.rollout.device_memory_gb
    return "CUDA" if gigabytes is None else f"rollout.device_memory_gb={gigabytes:g}"

"""The typed schema of a run's configuration: each key with type, default, meaning and range on its line.

Standard library only.  Each key has one owner: what the trainer needs stands under `trainer.grpo`, what NeMo's model
needs under `model`.  `model` and `exp_manager` hold NeMo's own keys, as their yaml in `conf/` lists them; those that
this project computes with are described by `ModelKeys`.  `nemo_prorl.checks` checks each value by its line, and
docs/reference/configuration.md is made from the lines.
"""

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

MISSING: Any = "???"  # OmegaConf's word for a key that must be given
RESET_RULES = ("validation_drop", "plateau", "kl_spike")  # those that may ask for a hard reset


@dataclass(frozen=True)
class KeyRule:
    """What a key means, and which values it takes; of a list, which values its items take."""

    meaning: str
    least: float | None = None  # the lowest value
    above: float | None = None  # values are larger than this
    most: float | None = None  # the highest value
    choices: tuple[Any, ...] = ()
    may_change: bool = False  # a run that is continued may change it; of a mapping, all below it
    described: Any = None  # of a mapping: the dataclass whose fields describe some of its keys


def key(default: Any, meaning: str, **rule: Any) -> Any:
    """Return the field of a key.  `default`: a value, or a function that makes it.  `rule`: as in `KeyRule`."""
    described = {"rule": KeyRule(meaning, **rule)}
    if callable(default):
        return field(default_factory=default, metadata=described)
    return field(default=default, metadata=described)


@dataclass
class CorrectionConfig:
    """Correction of the gap between the engine's policy and the trainer's (`algorithms.correction`)."""

    kind: str = key("tis", "form of the correction", choices=("none", "tis", "icepop", "sequence_mask"))
    cap: float = key(2.0, "upper bound of the importance weight pi_old / pi_engine", least=1)
    floor: float = key(0.5, "icepop, sequence_mask: tokens or sequences below it are masked", least=0)
    alarm: float | None = key(None, "gap to the engine that is reported; null: by precision", above=0)


@dataclass
class DynamicSamplingConfig:
    """Which groups are trained on, and how many may be drawn to find them (paper sec. 3.3)."""

    enabled: bool = key(True, "train only on groups whose rewards differ")
    tolerance: float = key(1e-6, "groups whose raw rewards differ by no more carry no signal", least=0)
    max_draw_factor: float = key(4.0, "prompts judged in a step, at most, in units of prompts_per_step", least=1)
    oversubscription: float = key(1.0, "groups in flight for each group that is expected to be needed", least=1)
    margin: float = key(0.0, "standard deviations drawn beyond the expected number", least=0)
    max_staleness: int = key(1, "groups made by weights older than this many steps are dropped", least=0)


@dataclass
class ShapingConfig:
    """Rewards by length.  For the loss only: dynamic sampling and validation see the raw ones."""

    overlong_tokens: int = key(0, "DAPO: last tokens over which the penalty builds up; 0: off", least=0)
    overlong_penalty: float = key(1.0, "taken off the reward of the longest response", least=0)
    cosine: bool = key(False, "replace the raw reward by a cosine of the response's length")
    cosine_correct: list[float] = key(lambda: [2.0, 1.0], "cosine of a right answer: at length 0, at the longest")
    cosine_wrong: list[float] = key(lambda: [-10.0, 0.0], "cosine of a wrong answer: at length 0, at the longest")
    cosine_exceeded: float = key(-10.0, "cosine: reward of a response that was cut off", least=-1000)
    cosine_every: int = key(0, "length of the cosine's schedule in steps; 0: all steps are shaped", least=0)
    cosine_for: int = key(0, "steps at the end of each schedule that the cosine shapes", least=0)


@dataclass
class AdaptiveEntropyConfig:
    """An entropy bonus that switches itself on where the entropy falls below a target (paper sec. 5.4)."""

    enabled: bool = key(False, "move the coefficient of the entropy bonus by the entropy")
    target: float = key(0.2, "nats per token", least=0)
    step: float = key(1e-4, "change of the coefficient per step", above=0)
    maximum: float = key(5e-3, "largest coefficient", least=0)


@dataclass
class GRPOConfig:
    """One training step (paper sec. 3, 4.1).  conf/algorithm/prorl.yaml has the paper's numbers."""

    max_steps: int = key(100, "steps in all; a continued run may only raise it", least=1, may_change=True)
    prompts_per_step: int = key(256, "groups that a step trains on", least=1)
    samples_per_prompt: int = key(16, "responses to a prompt: the size of a group", least=1)
    updates_per_step: int = key(4, "mini-batches of prompts_per_step / updates_per_step prompts", least=1)
    context_tokens: int = key(8192, "prompt and response together", least=2)
    max_response_tokens: int | None = key(None, "longest response; null: context_tokens minus the prompt", least=1)
    temperature: float = key(1.2, "of the rollout", above=0)
    advantage: str = key(
        "group_norm",
        "baseline and scale of advantages",
        choices=("group_norm", "leave_one_out", "reinforce_pp_baseline"),
    )
    aggregation: str = key("token", "average of the loss; constant: Dr.GRPO", choices=("token", "sequence", "constant"))
    clip_low: float = key(0.2, "the probability ratio is clipped at 1 minus this", above=0, most=1)
    clip_high: float = key(0.4, "the probability ratio is clipped at 1 plus this", above=0)
    dual_clip: float | None = key(None, "bound of the ratio where the advantage is negative; null: none", above=1)
    kl_coef: float = key(1e-4, "coefficient of the KL divergence to the reference policy", least=0)
    kl_estimator: str = key("k3", "estimator of that divergence", choices=("k1", "k2", "k3"))
    entropy_coef: float = key(0.0, "fixed coefficient of an entropy bonus", least=0)
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    unfinished_penalty: float = key(0.0, "taken off the shaped reward of a response without eos", least=0)
    unfinished_factor: float = key(1.0, "factor of the reward without eos, before the penalty", least=0, most=1)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    float32_head: bool = key(True, "logits of 16-bit models in float32, here and in the engines")
    logprob_chunk_tokens: int = key(4096, "rows of logits in memory at a time", least=1, may_change=True)
    logprob_chunk_words: int = key(8192, "words of the vocabulary at a time", least=1, may_change=True)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    checkpoint_every: int = key(20, "steps between checkpoints", least=1, may_change=True)
    keep_checkpoints: int = key(3, "newest checkpoints that are kept", least=1, may_change=True)
    keep_best: int = key(1, "checkpoints of the best validations beside them", least=0, may_change=True)
    checkpoint_budget_gb: float | None = key(None, "10^9 bytes of all checkpoints", above=0, may_change=True)
    async_checkpoints: bool = key(True, "train on while a checkpoint is written", may_change=True)
    validate_every: int = key(25, "steps between validations", least=1)
    validation_samples: int = key(4, "responses to a held-out prompt", least=1)
    validation_temperature: float = key(0.6, "of a validation's responses", least=0)
    validation_top_p: float = key(0.95, "of a validation's responses", above=0, most=1)
    save_rollout_groups: int = key(4, "groups per step written to rollouts/; -1: all", least=-1, may_change=True)


@dataclass
class ResetRulesConfig:
    """When a rule asks for a hard reset or advises: `algorithms.reset_rules` has the formulas."""

    asks: list[str] = key(lambda: list(RESET_RULES), "rules that ask; others advise", choices=RESET_RULES)
    cooldown_steps: int = key(50, "no rule asks this soon after the start, a reset or its last finding", least=1)
    drop_sigma: float = key(4.6, "standard deviations of the noise; 1 in 500,000 by chance", above=0)
    drop_min: float = key(0.05, "smaller drops of a validation score do not count", least=0)
    drop_baseline: int = key(10, "evaluations whose mean is the level before a drop", least=4)
    drop_confirm: int = key(2, "evaluations that must show a drop", least=1)
    plateau_steps: int = key(300, "steps in which a plateau is looked for", least=2)
    plateau_gain: float = key(0.02, "least gain of the mean validation score over plateau_steps", least=0)
    plateau_sigma: float = key(2.5, "standard deviations of the noise of that gain", least=0)
    kl_factor: float = key(3.0, "a spike is this many times the median of the steps before", above=1)
    kl_min: float = key(0.001, "nats per token; below it nothing is a spike", least=0)
    kl_sigma: float = key(5.0, "standard deviations above the median", least=0)
    kl_steps: int = key(30, "steps that say what is usual", least=13)
    truncation_rise: float = key(0.1, "advises: share cut off beyond that of the best 10 steps", least=0, most=1)
    length_factor: float = key(1.5, "advises: times the length of the shortest 10 steps", least=1)
    entropy_share: float = key(0.3, "advises: share of the entropy of the highest 10 steps", least=0, most=1)


@dataclass
class ResetsConfig:
    """Hard resets of reference policy and optimizer (paper sec. 3.3.1)."""

    mode: str = key("manual", "what rules do: nothing, advise or reset", choices=("manual", "advise", "auto"))
    at_steps: list[int] = key(list, "steps after whose updates there is a reset")
    every: int | None = key(None, "steps between resets; null: none at fixed distances", least=1)
    parts: str = key("both", "what is reset; one of them for ablations", choices=("both", "reference", "optimizer"))
    roll_back: bool = key(False, "return to the best validated weights since the last reset, if kept")
    lr_factor: float = key(1.0, "the learning rate is multiplied by it at each reset", above=0)
    lr_warmup_steps: int = key(0, "steps of rising learning rate after a reset, as moments start anew", least=0)
    kl_after_reset: float | None = key(None, "allowed gap to the reference after a reset; null: by precision", least=0)
    rules: ResetRulesConfig = field(default_factory=ResetRulesConfig)


@dataclass
class WarmupConfig:
    """Supervised steps before the reinforcement learning, from the prompts' own answers."""

    steps: int = key(0, "0: none", least=0)
    batch_size: int = key(64, "answers per step", least=1)
    lr: float = key(1e-3, "learning rate", least=0)


@dataclass
class DeadlinesConfig:
    """Seconds that each wait may take; every error names its key."""

    startup_s: float = key(300.0, "start of engines and reward servers", above=0)
    rollout_s: float = key(3600.0, "a step's rollout", above=0)
    reward_s: float = key(600.0, "one verdict", above=0)
    publish_s: float = key(300.0, "new weights in all engines", above=0)
    collective_s: float = key(1800.0, "one operation of all ranks", above=0)
    stop_s: float = key(30.0, "a process that is asked to end", above=0)
    health_s: float = key(120.0, "a service that does not answer for so long is started again", above=0)
    finish_step_s: float = key(120.0, "asked to stop: a longer rollout is given up", above=0)
    job_s: float | None = key(None, "the run stops before its job lasts this long; null: no limit", above=0)


@dataclass
class TrainerConfig:
    """PyTorch Lightning's trainer, as NeMo-Aligner builds it, and what trains with it."""

    num_nodes: int = key(1, "nodes of the run", least=1, may_change=True)
    devices: int = key(1, "trainer ranks per node", least=1, may_change=True)
    accelerator: str = key("gpu", "what the trainer computes on", choices=("cpu", "gpu"))
    # fp16 would need its loss scaled
    precision: Any = key("bf16", "of the trainer", choices=(32, "32", "32-true", "bf16", "bf16-mixed"))
    gradient_clip_val: float = key(1.0, "norm that gradients are clipped to; 0: not clipped", least=0)
    trace_steps: list[int] = key(list, "steps of which a timeline of all processes is written", may_change=True)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    resets: ResetsConfig = field(default_factory=ResetsConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    deadlines: DeadlinesConfig = key(DeadlinesConfig, "seconds that each wait may take", may_change=True)


@dataclass
class PretrainedConfig:
    """Where the policy's first weights come from."""

    restore_from_path: str | None = key(MISSING, "a Hugging Face folder; null (model=laptop): random weights")


@dataclass
class RolloutConfig:
    """The rollout engines (vLLM in an environment of its own)."""

    python: str = key(".venv/rollout/bin/python", "Python of the rollout environment", may_change=True)
    engines: int = key(1, "in all nodes together", least=1, may_change=True)
    tensor_parallel_size: int = key(1, "ranks of an engine", least=1, may_change=True)
    own_devices: bool = key(False, "GPUs (CPU: cores) of the engines' own, which then work a step ahead")
    dtype: str = key("float32", "of the engine's weights", choices=("float32", "bfloat16", "float16"))
    threads: int = key(1, "threads of a CPU engine's rank", least=1, may_change=True)
    max_num_seqs: int = key(256, "sequences that an engine generates at a time", least=1, may_change=True)
    max_batched_tokens: int = key(4096, "tokens of an engine's step", least=1, may_change=True)
    kv_cache_mb: int | None = key(None, "KV cache of an engine; null: what vLLM takes", least=1, may_change=True)
    device_memory_gb: float | None = key(None, "10^9 bytes of a GPU; null: by nvidia-smi", above=0, may_change=True)
    eager: bool = key(False, "run without CUDA graphs", may_change=True)
    sleep: int | None = key(
        None, "give memory to the trainer; 1: weights to the host, 2: dropped", choices=(1, 2), may_change=True
    )
    max_restarts: int = key(5, "of one engine within an hour", least=0, may_change=True)


@dataclass
class RewardsConfig:
    """The reward server of a node."""

    workers: int = key(1, "worker processes per node, shared out over the tasks in use", least=1, may_change=True)
    max_infrastructure_failures: int = key(8, "in a row; then the run stops and names the plugin", least=1)
    unsafe_no_sandbox: bool = key(False, "without a sandbox run code with all your rights", may_change=True)
    plugins: dict[str, Any] = key(dict, "settings by plugin name")


@dataclass
class DataSource:
    """One source of a blend: either a file of prompt records, or tasks made on the spot by a generator."""

    name: str = key(MISSING, "of the source, and of its validation")
    path: str | None = key(None, "a file of prompt records")
    generator: str | None = key(None, "reasoning_gym:DATASET, arithmetic, code, stem or instructions")
    options: dict[str, Any] = key(dict, "the generator's own")
    size: int | None = key(None, "records to generate; of a file: its first records", least=1)
    weight: float = key(1.0, "share of the blend, in proportion", above=0)
    seed: int = key(0, "of the generator")


@dataclass
class DataConfig:
    """What is trained on and what is held out."""

    train: list[DataSource] = key(list, "sources of training")
    validation: list[DataSource] = key(list, "sources that are held out")
    tasks: list[str] | None = key(None, "training takes records of these tasks only; null: of all")
    retire_after: int | None = key(None, "a prompt solved in so many draws in a row is not drawn again", least=1)
    max_prompt_tokens: int | None = key(None, "longer prompts are left out; null: they are errors", least=1)
    folder: str = key("prepared", "of data=prorl: a folder for each source, as `prorl data prepare` writes them")


@dataclass
class ChainConfig:
    """How a stage hangs on the one before it (paper sec. 4.2)."""

    after: str | None = key(None, "the stage before, whose run directory lies beside this run's")
    start_from: str | None = key(None, "run directory or checkpoint of the stage before, where it lies elsewhere")
    hard_reset: bool = key(True, "begin with a hard reset")
    step_scale: float = key(1.0, "factor of the stages' steps; a cluster sets it", above=0)
    long_context_tokens: int = key(16384, "context of run8; a cluster sets it", least=2)


@dataclass
class LaunchConfig:
    """Starting the run's processes, above all by Slurm."""

    env: dict[str, str] = key(dict, "variables of all processes; those of the environment win")
    attempts: int = key(3, "starts in a row without a new checkpoint, after which a job ends", least=1)


@dataclass
class OptimKeys:
    """Keys of NeMo's optimizer that are checked."""

    name: str = key(MISSING, "the optimizer", choices=("mcore_distributed_optim",))
    lr: float | None = key(MISSING, "learning rate", least=0)
    weight_decay: float | None = key(MISSING, "of AdamW", least=0)


@dataclass
class ModelKeys:
    """Keys of NeMo's model that are checked; conf/model and conf/config.yaml list all that are set."""

    num_layers: int = key(MISSING, "transformer layers", least=1)
    hidden_size: int = key(MISSING, "width of the model", least=2)
    ffn_hidden_size: int = key(MISSING, "width of the gated layer", least=1)
    num_attention_heads: int = key(MISSING, "query heads", least=1)
    num_query_groups: int = key(MISSING, "key and value heads", least=1)
    max_position_embeddings: int = key(MISSING, "longest sequence of the model", least=2)
    encoder_seq_length: int | None = key(MISSING, "longest sequence that is trained on", least=2)
    make_vocab_size_divisible_by: int = key(MISSING, "rows of the embedding are padded to a multiple", least=1)
    tensor_model_parallel_size: int = key(MISSING, "ranks that a layer is cut over", least=1, may_change=True)
    pipeline_model_parallel_size: int = key(MISSING, "ranks that the layers are dealt to", least=1, may_change=True)
    virtual_pipeline_model_parallel_size: int | None = key(None, "not supported", may_change=True)
    sequence_parallel: bool = key(False, "cut activations over tensor ranks too", may_change=True)
    micro_batch_size: int = key(MISSING, "responses of a micro-batch", least=1, may_change=True)
    micro_batch_tokens: int | None = key(None, "tokens of a micro-batch; null: no limit", may_change=True)
    packed_sequences: bool = key(False, "rows of a micro-batch without padding between them", may_change=True)
    fp8: str | None = key(None, "format of Transformer Engine's FP8; null: none", choices=("hybrid", "e4m3"))
    fp8_recipe: str | None = key(None, "scales of FP8", choices=("tensorwise", "delayed"))
    position_embedding_type: str = key("rope", "position embedding", choices=("rope",))
    normalization: str = key("rmsnorm", "normalisation", choices=("rmsnorm",))
    activation: str = key("fast-swiglu", "activation", choices=("fast-swiglu",))
    optim: OptimKeys = field(default_factory=OptimKeys)


@dataclass
class Config:
    """The whole configuration of a run."""

    run_dir: str = key("runs/laptop", "folder of the run; a stage's default is runs/prorl/STAGE", may_change=True)
    stage: str = key("none", "set by the group stage=run1..run8")
    seed: int = key(1, "of data, sampling and weights", least=0)
    deterministic: bool = key(False, "equal runs are equal to the bit, at some speed")
    on_event: str | None = key(None, "a command called with each alarm, reset and failure", may_change=True)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: dict[str, Any] = key(dict, "NeMo's model: +model.KEY=VALUE sets one more of its keys", described=ModelKeys)
    pretrained_checkpoint: PretrainedConfig = field(default_factory=PretrainedConfig)
    exp_manager: dict[str, Any] = key(dict, "NeMo's experiment manager: folders and loggers", may_change=True)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    launch: LaunchConfig = key(LaunchConfig, "starting the processes", may_change=True)


class ConfigKey(NamedTuple):
    """A key as `all_keys` lists it.  `name` has `*` for the index of a list."""

    name: str
    kind: Any  # its type, without None
    optional: bool  # null is allowed
    default: Any
    rule: KeyRule


def all_keys(section: Any = Config, prefix: str = "") -> Iterator[ConfigKey]:
    """Yield every key of the schema with a rule, in the order of its lines."""
    hints = get_type_hints(section)
    for line in fields(section):
        name, kind, rule = prefix + line.name, hints[line.name], line.metadata.get("rule")
        optional = get_origin(kind) in (types.UnionType, Union) and type(None) in get_args(kind)
        if optional:
            [kind] = (part for part in get_args(kind) if part is not type(None))
        if rule is not None:
            default = line.default if line.default_factory is dataclasses.MISSING else line.default_factory()
            yield ConfigKey(name, kind, optional, default, rule)
        below = rule.described if rule is not None and rule.described else kind
        items = get_args(kind)[0] if get_origin(kind) is list else None
        if is_dataclass(below):
            yield from all_keys(below, f"{name}.")
        elif is_dataclass(items):
            yield from all_keys(items, f"{name}.*.")

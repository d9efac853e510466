"""The typed schema of a run's configuration: the type, default, meaning and range of each key.

`nemo_prorl.checks` checks each value against its field here, and docs/reference/configuration.md is generated from the
fields.  Each key has one owner: the trainer's keys are under `trainer.grpo`, those of NeMo's model under `model`.
`model` and `exp_manager` contain NeMo's own keys, which the yaml files in `conf/` list; `ModelKeys` describes the
keys of `model` that this project computes with.  Imports the standard library only.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

MISSING: Any = "???"  # OmegaConf's marker for a key without a default
RESET_RULES = ("validation_drop", "plateau", "kl_spike")  # rules that ask for a hard reset by default
ADVISING_RULES = ("truncation", "length", "entropy", "kl_high")  # by default these only advise


@dataclass(frozen=True)
class KeyRule:
    """The meaning and the allowed values of a key; for a list, the allowed values of its items."""

    meaning: str  # a noun phrase with its unit, for docs/reference/configuration.md
    least: float | None = None  # lowest allowed value
    above: float | None = None  # exclusive lower bound
    most: float | None = None  # highest allowed value
    choices: tuple[Any, ...] = ()
    own: bool = False  # besides `choices`, a function of the user: FILE.py:FUNCTION or MODULE:FUNCTION
    may_change: bool = False  # a continued run may change the key; for a mapping, also every key below it
    described: Any = None  # for a mapping: a dataclass whose fields describe some of its keys


def key(default: Any, meaning: str, **rule: Any) -> Any:
    """Return the dataclass field of a key.

    Args:
        default: a value, or a function that makes the value.
        rule: the other fields of `KeyRule`.
    """
    metadata = {"rule": KeyRule(meaning, **rule)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class CorrectionConfig:
    """Correction of the gap between the engine's policy and the trainer's policy (`algorithms.correction`)."""

    kind: str = key(
        "tis",
        "method: none, capped weights (tis), masked tokens (icepop), masked responses (sequence_mask)",
        choices=("none", "tis", "icepop", "sequence_mask"),
    )
    cap: float | None = key(
        2.0,
        "largest ratio pi_old / pi_engine: tis clips to it, the other methods mask above it; null: no upper bound",
        least=1,
    )
    floor: float = key(0.5, "smallest ratio pi_old / pi_engine: icepop and sequence_mask mask below it", least=0)
    alarm: float | None = key(
        None,
        "mean gap between engine and trainer above which an alarm is raised, nats per token; null: by precision, 0.001"
        " to 0.1",
        above=0,
    )


@dataclass
class DynamicSamplingConfig:
    """Selection of the groups to train on, and limits for the draws that find them (paper sec. 3.3)."""

    enabled: bool = key(True, "train only on groups whose rewards differ")
    tolerance: float = key(1e-6, "largest difference of raw rewards that still counts as no signal", least=0)
    max_draw_factor: float = key(
        4.0, "maximum groups drawn per step, carried groups included, as a multiple of prompts_per_step", least=1
    )
    margin: float = key(
        0.0, "groups to draw beyond the expected need, in standard deviations of the number that is kept", least=0
    )
    max_staleness: int = key(1, "maximum age of a group's weights, in steps; older groups are dropped", least=0)


@dataclass
class ShapingConfig:
    """Rewards that depend on the response length.  Only the loss uses them; dynamic sampling and validation do not."""

    overlong_tokens: int = key(
        0, "DAPO: number of tokens before the length limit over which the penalty rises; 0: off", least=0
    )
    overlong_penalty: float = key(1.0, "DAPO: penalty subtracted from the reward at the length limit", least=0)
    cosine: bool = key(False, "replace the raw reward by a cosine of the response length")
    cosine_correct: list[float] = key(lambda: [2.0, 1.0], "cosine: right answer's reward at length 0 and at the limit")
    cosine_wrong: list[float] = key(lambda: [-10.0, 0.0], "cosine: wrong answer's reward at length 0 and at the limit")
    cosine_exceeded: float = key(-10.0, "cosine: reward of a response that was cut off", least=-1000)
    cosine_every: int = key(0, "cosine: length of the schedule in steps; 0: every step is shaped", least=0)
    cosine_for: int = key(0, "cosine: number of steps at the end of each schedule that are shaped", least=0)


@dataclass
class AdaptiveEntropyConfig:
    """An entropy bonus that applies only while the entropy is at or below a target (paper sec. 5.4)."""

    enabled: bool = key(False, "adapt the coefficient of the entropy bonus to the measured entropy")
    target: float = key(0.2, "entropy at or below which the bonus applies, nats per token", least=0)
    step: float = key(1e-4, "change of the coefficient per training step", above=0)
    maximum: float = key(5e-3, "largest coefficient", least=0)


@dataclass
class GRPOConfig:
    """Settings of the training step (paper sec. 3, 4.1).  conf/algorithm/prorl.yaml has the paper's values."""

    max_steps: int = key(100, "total number of steps; a continued run may only raise it", least=1, may_change=True)
    prompts_per_step: int = key(256, "groups in the batch of a step", least=1)
    samples_per_prompt: int = key(16, "responses per prompt: the size of a group", least=1)
    updates_per_step: int = key(4, "mini-batches per step of prompts_per_step / updates_per_step prompts each", least=1)
    context_tokens: int = key(8192, "maximum tokens of prompt and response together", least=2)
    max_response_tokens: int | None = key(None, "maximum tokens of a response; null: the rest of the context", least=1)
    temperature: float = key(1.2, "sampling temperature of training responses", above=0)
    advantage: str = key(
        "group_norm",
        "estimator of advantages: baseline and scale",
        choices=("group_norm", "leave_one_out", "reinforce_pp_baseline", "mean_only", "maxrl"),
        own=True,
    )
    loss: str = key(
        "clip", "objective of each token that the loss maximizes", choices=("clip", "cispo", "gspo", "dppo"), own=True
    )
    aggregation: str = key(
        "token",
        "terms that the loss averages over: tokens, responses, a constant per response (Dr. GRPO), or prompts",
        choices=("token", "sequence", "constant", "prompt"),
    )
    clip_low: float = key(0.2, "lower clip range: the probability ratio is clipped at 1 - clip_low", above=0, most=1)
    clip_high: float = key(0.4, "upper clip range: the probability ratio is clipped at 1 + clip_high", above=0)
    dual_clip: float | None = key(None, "largest ratio where the advantage is negative; null: no limit", above=1)
    kl_coef: float = key(1e-4, "coefficient of the KL divergence to the reference policy", least=0)
    kl_estimator: str = key("k3", "estimator of the KL divergence", choices=("k1", "k2", "k3"))
    entropy_coef: float = key(0.0, "fixed coefficient of the entropy bonus", least=0)
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    unfinished_penalty: float = key(0.0, "penalty subtracted from the shaped reward of a response without eos", least=0)
    unfinished_factor: float = key(1.0, "reward factor of a response without eos, before the penalty", least=0, most=1)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    float32_head: bool = key(True, "compute the logits of 16-bit models in float32, in trainer and engines")
    logprob_chunk_tokens: int = key(4096, "tokens whose logits are in memory at once", least=1, may_change=True)
    logprob_chunk_words: int = key(8192, "vocabulary entries per chunk of logits in memory", least=1, may_change=True)
    old_logp: str = key(
        "trainer",
        "whose log-probabilities are pi_old: the trainer's, or the engine's, which saves a forward pass in most steps",
        choices=("trainer", "engine"),
        may_change=True,
    )
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    max_steps_without_signal: int = key(
        5, "steps in a row without a group to train on, after which the run stops; 0: never", least=0, may_change=True
    )
    max_nonfinite_updates: int = key(
        3,
        "updates in a row that are skipped because they are not finite, at which the run ends",
        least=1,
        may_change=True,
    )
    checkpoint_every: int = key(20, "steps between checkpoints", least=1, may_change=True)
    keep_checkpoints: int = key(3, "number of newest checkpoints to keep", least=1, may_change=True)
    keep_best: int = key(1, "further checkpoints to keep: those with the best validations", least=0, may_change=True)
    checkpoint_budget_gb: float | None = key(
        None, "disk space for all checkpoints, in GB (10^9 bytes); null: no limit", above=0, may_change=True
    )
    async_checkpoints: bool = key(True, "write checkpoints in the background while training continues", may_change=True)
    validate_every: int = key(25, "steps between validations", least=1)
    validation_samples: int = key(4, "responses per held-out prompt", least=1)
    validation_temperature: float = key(0.6, "sampling temperature of validations", least=0)
    validation_top_p: float = key(0.95, "top-p (nucleus) sampling of validations", above=0, most=1)
    save_rollout_groups: int = key(
        4,
        "number of groups of each step to write to rollouts/: the first ones in draw order, trained on or not; -1: all",
        least=-1,
        may_change=True,
    )
    keep_batches: int = key(
        20, "newest steps whose complete groups are kept in batches/, 9 bytes per token", least=0, may_change=True
    )
    keep_batches_every: int | None = key(
        100, "steps between batches that are kept for ever; null: none", least=1, may_change=True
    )


@dataclass
class ResetRulesConfig:
    """Rules that trigger or advise a hard reset; `algorithms.reset_rules` has the formulas."""

    asks: list[str] = key(
        lambda: list(RESET_RULES),
        "rules that trigger a reset, or a stop; others advise",
        choices=(*RESET_RULES, *ADVISING_RULES),
        own=True,
    )
    cooldown_steps: int = key(50, "pause of a rule after the start, a reset or its last finding, in steps", least=1)
    drop_sigma: float = key(4.6, "drop: threshold in noise standard deviations; 4.6: 1 in 500,000 by chance", above=0)
    drop_min: float = key(0.05, "drop: smallest fall of a validation score that counts", least=0)
    drop_baseline: int = key(10, "drop: number of evaluations whose mean is the level before the fall", least=4)
    drop_confirm: int = key(2, "drop: number of evaluations that must show the fall", least=1)
    plateau_steps: int = key(300, "plateau: length of the shortest window, in steps", least=2)
    plateau_gain: float = key(0.02, "plateau: least gain of the mean validation score in plateau_steps", least=0)
    plateau_sigma: float = key(
        5.0, "plateau: certainty that the gain is less, in standard deviations of its noise", least=0
    )
    kl_factor: float = key(3.0, "KL spike: threshold as a multiple of the median KL", above=1)
    kl_min: float = key(0.001, "KL spike: smallest KL that counts, nats per token", least=0)
    kl_sigma: float = key(5.0, "KL spike: threshold in standard deviations above the median", least=0)
    kl_steps: int = key(30, "KL spike: number of preceding steps for the median", least=13)
    kl_high: float = key(5.0, "advice: mean KL of 10 steps, nats per token", above=0)
    truncation_rise: float = key(
        0.1, "advice: rise of the share of cut-off responses above its lowest 10 steps", least=0, most=1
    )
    length_factor: float = key(
        1.5, "advice: rise of the mean response length, as a multiple of its lowest 10 steps", least=1
    )
    entropy_share: float = key(
        0.3, "advice: fall of the entropy to this share of its highest 10 steps", least=0, most=1
    )


@dataclass
class ResetsConfig:
    """Hard resets of reference policy and optimizer (paper sec. 3.3.1)."""

    mode: str = key(
        "advise",
        "effect of the rules: none (manual), alarms (advise), alarms and resets (auto), alarms and a stop (stop);"
        " trial: each reset that rules, at_steps or every ask for is tried, and kept only if it wins",
        choices=("manual", "advise", "auto", "stop", "trial"),
        may_change=True,
    )
    trial_steps: int = key(100, "steps with and without the reset in a trial (mode=trial)", least=1, may_change=True)
    trial_every: int = key(500, "fewest steps from the start of a trial to the next", least=1, may_change=True)
    trial_noise: float = key(
        0.005,
        "standard deviation of the difference between two equal arms, beyond that of the prompts",
        least=0,
        may_change=True,
    )
    at_steps: list[int] = key(list, "steps after whose updates a reset takes place", may_change=True)
    every: int | None = key(None, "steps between resets; null: no regular resets", least=1, may_change=True)
    # Parts, factor and rise also decide the learning rate after resets that were made before, so they may not change.
    parts: str = key(
        "both",
        "what is reset; one part alone for ablations; none: only roll_back and lr_factor act",
        choices=("both", "reference", "optimizer", "none"),
    )
    roll_back: bool = key(
        False, "at a reset return to the best validated weights since the last reset, if kept", may_change=True
    )
    lr_factor: float = key(1.0, "factor that multiplies the learning rate at each reset", above=0)
    lr_factor_steps: int | None = key(None, "steps after a reset that have its lr_factor; null: all", least=1)
    lr_warmup_steps: int = key(
        0, "steps of rising learning rate after a reset of the optimizer; 0: as model.optim.sched", least=0
    )
    kl_after_reset: float | None = key(
        None,
        "allowed gap between policy and reference right after a reset, nats per token; null: by precision, 1e-5 to"
        " 1e-3",
        least=0,
        may_change=True,
    )
    rules: ResetRulesConfig = key(ResetRulesConfig, "settings of the rules", may_change=True)


@dataclass
class WarmupConfig:
    """Supervised steps on the prompts' own answers, before the reinforcement learning."""

    steps: int = key(0, "number of supervised steps; 0: no warm-up", least=0)
    batch_size: int = key(64, "answers per step", least=1)
    lr: float = key(1e-3, "learning rate of the warm-up", least=0)


@dataclass
class DeadlinesConfig:
    """Time limits of all waits, in seconds.  The error of a missed deadline names its key."""

    startup_s: float = key(300.0, "seconds until engines and reward servers must be ready", above=0)
    rollout_s: float = key(3600.0, "seconds of a rollout without a new token or response", above=0)
    reward_s: float = key(600.0, "seconds without a verdict on its task, while one is waited for", above=0)
    publish_s: float = key(300.0, "seconds until all engines must have new weights", above=0)
    collective_s: float = key(1800.0, "seconds for one collective operation of all ranks", above=0)
    stop_s: float = key(30.0, "seconds for a process to end after a stop signal", above=0)
    health_s: float = key(120.0, "seconds without an answer after which a service is restarted", above=0)
    finish_step_s: float = key(
        120.0, "seconds for the rollout under way after a stop request; a longer one is given up", above=0
    )
    job_s: float | None = key(None, "seconds of the whole job; the run stops before the end; null: no limit", above=0)


@dataclass
class TrainerConfig:
    """PyTorch Lightning's trainer, as NeMo-Aligner builds it, and the settings of the training."""

    num_nodes: int = key(1, "nodes of the run", least=1, may_change=True)
    devices: int = key(1, "trainer ranks per node", least=1, may_change=True)
    accelerator: str = key("gpu", "device type of the trainer", choices=("cpu", "gpu"))
    # fp16 is missing because it would need loss scaling.
    precision: Any = key("bf16", "numeric format of the trainer", choices=(32, "32", "32-true", "bf16", "bf16-mixed"))
    gradient_clip_val: float = key(1.0, "maximum norm of the gradient; 0: no clipping", least=0)
    trace_steps: list[int] = key(list, "steps for which a timeline of all processes is written", may_change=True)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    resets: ResetsConfig = field(default_factory=ResetsConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    deadlines: DeadlinesConfig = key(DeadlinesConfig, "time limits of waits, in seconds", may_change=True)


@dataclass
class PretrainedConfig:
    """Source of the policy's first weights."""

    restore_from_path: str | None = key(
        MISSING, "Hugging Face folder, or NAMESPACE/NAME[@REVISION] on the hub; null (model=laptop): random weights"
    )


@dataclass
class RolloutConfig:
    """The rollout engines (vLLM in a separate environment)."""

    python: str = key(".venv/rollout/bin/python", "Python interpreter of the rollout environment", may_change=True)
    engines: int = key(1, "number of engines on all nodes together", least=1, may_change=True)
    tensor_parallel_size: int = key(1, "tensor-parallel ranks per engine", least=1, may_change=True)
    own_devices: bool = key(False, "separate GPUs (CPU: cores) for the engines, which then generate one step ahead")
    dtype: str | None = key(
        None,
        "data type of the engine's weights; null: bfloat16 if trainer.precision is bf16, otherwise float32",
        choices=("float32", "bfloat16", "float16"),
    )
    threads: int | None = key(
        None,
        "CPU threads per rank of a CPU engine; null: by cores and model size",
        least=1,
        may_change=True,
    )
    max_num_seqs: int = key(256, "maximum sequences that an engine generates at once", least=1, may_change=True)
    max_batched_tokens: int = key(4096, "tokens per engine step, at least context_tokens", least=1, may_change=True)
    kv_cache_mb: int | None = key(
        None,
        "MiB of KV cache per engine rank; null: all that the trainer leaves; CPU, evaluation: vLLM's default",
        least=1,
        may_change=True,
    )
    device_memory_gb: float | None = key(
        None, "GB (10^9 bytes) per GPU; null: as CUDA reports", above=0, may_change=True
    )
    eager: bool = key(False, "run without CUDA graphs", may_change=True)
    sleep: int | None = key(
        None,
        "release of GPU memory to the trainer: 1: weights go to host memory, 2: weights are dropped; null: off",
        choices=(1, 2),
        may_change=True,
    )
    max_restarts: int = key(5, "restarts of one engine or reward server within an hour", least=0, may_change=True)
    recycle_gb: float | None = key(
        None,
        "host memory in GB (10^9 bytes) above which an engine is restarted between two steps; null: never",
        above=0,
        may_change=True,
    )


@dataclass
class RewardsConfig:
    """The reward server of each node."""

    workers: int = key(1, "worker processes per node, shared by the tasks in use", least=1, may_change=True)
    max_infrastructure_failures: int = key(8, "failures in a row after which the run stops", least=1)
    unsafe_no_sandbox: bool = key(False, "run code with all your rights where no sandbox works", may_change=True)
    plugins: dict[str, Any] = key(dict, "settings by plugin name")
    functions: dict[str, str] = key(dict, "reward functions of your own, FILE.py:FUNCTION by task")
    functions_time_s: float = key(
        10.0,
        "CPU seconds of a reward function for one response (then 0); 4 times as long in all (then no score)",
        above=0,
    )


@dataclass
class DataSource:
    """A source of a blend: either a file of prompt records, or a generator that makes records at the start."""

    name: str = key(MISSING, "name of the source and of its validation score")
    path: str | None = key(None, "file of prompt records")
    generator: str | None = key(None, "record generator: reasoning_gym:DATASET, arithmetic, code, stem or instructions")
    options: dict[str, Any] = key(dict, "options of the generator")
    size: int | None = key(None, "number of records to generate; with path: number of first records to use", least=1)
    weight: float = key(1.0, "relative share of the source in the blend", above=0)
    seed: int = key(0, "random seed of the generator")


# The recommended default prompt of reasoning-gym (SYSTEM_PROMPTS["default"]), as the paper's section 2.4 uses it.
PUZZLE_FORM = """\
Given a problem, your task is to answer the question by thinking step-by-step in a clear and specific manner.
Once you have thought about the reasoning process, provide the answer in the following format:
<answer>answer here</answer>
Do not explain your reasoning inside the answer tags, provide only the final answer. When an example is provided, you \
should strictly follow the format of the output/answer in that example."""


def _templates() -> dict[str, str]:
    boxed = "Let's think step by step and output the final answer within \\boxed{}."  # paper section 2.1
    fenced = "Write it in Python. End with the whole program in one block, such as\n```python\nprint(42)\n```"
    forms = {"math": boxed, "stem": boxed, "code": fenced}
    return {task: f"{{problem}}\n\n{form}" for task, form in forms.items()} | {
        "puzzles": f"{PUZZLE_FORM}\n\n{{problem}}"
    }


@dataclass
class DataConfig:
    """Training data, held-out data, and the form of the prompts."""

    train: list[DataSource] = key(list, "sources of training prompts")
    validation: list[DataSource] = key(list, "sources of held-out prompts")
    tasks: list[str] | None = key(None, "tasks to train on; null: all tasks")
    retire_after: int | None = key(
        None, "number of solved draws in a row after which a prompt is no longer drawn; null: off", least=1
    )
    retire_rate: float = key(
        1.0, "lowest mean reward of a group at which this draw of its prompt counts as solved", above=0, most=1
    )
    max_prompt_tokens: int | None = key(
        None,
        "maximum tokens of a training prompt; longer ones are left out; null: too long for the context is an error",
        least=1,
    )
    prompt: str = key(
        "as_written",
        "form of the prompts: text stays text and messages go through the chat template (as_written); all through the"
        " chat template (chat); all as text (text); all as DeepSeek-R1-Zero's dialogue that ends in `<think>` (r1)",
        choices=("as_written", "chat", "text", "r1"),
    )
    system: str | None = key(None, "system prompt of every prompt; null: none")
    templates: dict[str, str] = key(
        _templates, "prompt of a generated problem by task; {problem} is its text; a file's prompts are complete"
    )
    folder: str = key("prepared", "data=prorl: folder with one folder per source, as `prorl data prepare` writes them")


@dataclass
class ChainConfig:
    """Link of a stage to the previous stage (paper sec. 4.2)."""

    after: str | None = key(None, "name of the previous stage; its run directory has the same parent folder")
    start_from: str | None = key(None, "run directory or checkpoint of the previous stage, if elsewhere")
    hard_reset: bool = key(True, "begin the stage with a hard reset")
    step_scale: float = key(1.0, "factor for the steps of all stages; set by the cluster group", above=0)
    long_context_tokens: int = key(16384, "tokens of the context of stage run8; set by the cluster group", least=2)


@dataclass
class LaunchConfig:
    """Start of the run's processes, mainly under Slurm."""

    env: dict[str, str] = key(dict, "environment variables of all processes; variables already set win")
    attempts: int = key(3, "starts in a row without a new checkpoint after which a job ends", least=1)
    gpus_per_node: int | None = key(None, "GPUs of a node, which a layout must fit; null: not checked", least=1)


@dataclass
class SchedKeys:
    """The learning rate over the steps of a stage, under the names of NeMo's section `model.optim.sched`."""

    name: str = key(
        "constant",
        "the rate after the warm-up: constant, or falling to min_lr",
        choices=("constant", "linear", "cosine"),
    )
    warmup_steps: int = key(0, "steps of rising rate, at the start and after each reset of the optimizer", least=0)
    warmup_ratio: float = key(0.0, "the same as a share of the stage's steps, rounded up", least=0, most=1)
    min_lr: float = key(0.0, "rate right after the stage's last step, for linear and cosine", least=0)


@dataclass
class OptimKeys:
    """The keys of NeMo's section `model.optim` that are checked."""

    name: str = key(MISSING, "optimizer", choices=("mcore_distributed_optim",))
    lr: float | None = key(MISSING, "learning rate", least=0)
    weight_decay: float | None = key(MISSING, "weight decay of AdamW", least=0)
    betas: list[float] = key(MISSING, "decay of Adam's first and second moments, each below 1")
    eps: float = key(1e-8, "term that Adam adds to the root of the second moment", least=0)
    sched: SchedKeys = field(default_factory=SchedKeys)


@dataclass
class ModelKeys:
    """The keys of NeMo's section `model` that are checked; conf/model and conf/config.yaml list all keys."""

    num_layers: int = key(MISSING, "number of transformer layers", least=1)
    hidden_size: int = key(MISSING, "width of the hidden state", least=2)
    ffn_hidden_size: int = key(MISSING, "width of the gated feed-forward layer", least=1)
    num_attention_heads: int = key(MISSING, "number of query heads", least=1)
    num_query_groups: int = key(MISSING, "number of key and value heads", least=1)
    max_position_embeddings: int = key(MISSING, "longest sequence that the model supports, in tokens", least=2)
    encoder_seq_length: int | None = key(MISSING, "longest training sequence, in tokens", least=2)
    make_vocab_size_divisible_by: int = key(MISSING, "divisor of the padded vocabulary size", least=1)
    tensor_model_parallel_size: int = key(MISSING, "tensor-parallel ranks of the trainer", least=1, may_change=True)
    pipeline_model_parallel_size: int = key(MISSING, "pipeline-parallel ranks of the trainer", least=1, may_change=True)
    virtual_pipeline_model_parallel_size: int | None = key(None, "not supported", may_change=True)
    sequence_parallel: bool = key(False, "split activations over the tensor-parallel ranks too", may_change=True)
    micro_batch_size: int = key(MISSING, "maximum responses per micro-batch", least=1, may_change=True)
    micro_batch_tokens: int | None = key(None, "maximum tokens per micro-batch; null: no limit", may_change=True)
    packed_sequences: bool = key(False, "pack responses of a micro-batch without padding between", may_change=True)
    fp8: str | None = key(None, "FP8 format of Transformer Engine; null: no FP8", choices=("hybrid", "e4m3"))
    fp8_recipe: str | None = key(None, "scaling recipe of FP8", choices=("tensorwise", "delayed"))
    position_embedding_type: str = key("rope", "type of position embedding", choices=("rope",))
    normalization: str = key("rmsnorm", "type of normalization", choices=("rmsnorm",))
    activation: str = key("fast-swiglu", "activation function", choices=("fast-swiglu",))
    optim: OptimKeys = field(default_factory=OptimKeys)


@dataclass
class Config:
    """The whole configuration of a run."""

    run_dir: str = key(
        "runs/laptop",
        "directory of the run; default of each cluster: runs/laptop, with a stage runs/prorl/STAGE",
        may_change=True,
    )
    stage: str = key("none", "stage of the chain, set by the group stage=run1..run8")
    config_dir: str | None = key(
        None,
        "folder with your own option files, such as data/mine.yaml for data=mine; in these files, `${config_dir}` is"
        " the path of the folder",
        may_change=True,
    )
    seed: int = key(1, "random seed of data, sampling and weights", least=0)
    deterministic: bool = key(False, "bitwise equal results of equal runs, at lower speed")
    on_event: str | None = key(None, "command to call with each alarm, reset and failure", may_change=True)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: dict[str, Any] = key(dict, "keys of NeMo's model; +model.KEY=VALUE sets one more", described=ModelKeys)
    pretrained_checkpoint: PretrainedConfig = field(default_factory=PretrainedConfig)
    exp_manager: dict[str, Any] = key(dict, "keys of NeMo's experiment manager: folders and loggers", may_change=True)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    launch: LaunchConfig = key(LaunchConfig, "start of the processes", may_change=True)


def num_ranks(cfg: Any) -> int:
    """Return the number of trainer ranks on all nodes.  `cfg`: a `Config`, or a DictConfig with its keys."""
    return int(cfg.trainer.num_nodes * cfg.trainer.devices)


def num_data_ranks(cfg: Any) -> int:
    """Return the number of data-parallel ranks; a model's tensor- and pipeline-parallel ranks count once."""
    return num_ranks(cfg) // int(cfg.model["tensor_model_parallel_size"] * cfg.model["pipeline_model_parallel_size"])


def responses_per_step(cfg: Any) -> int:
    """Return the number of responses that a step trains on."""
    return int(cfg.trainer.grpo.prompts_per_step * cfg.trainer.grpo.samples_per_prompt)


def warms_up(cfg: Any) -> bool:
    """Return whether the run starts with supervised steps.  A run that continues another run never does."""
    return bool(cfg.trainer.warmup.steps > 0 and cfg.chain.after is None and cfg.chain.start_from is None)


class ConfigKey(NamedTuple):
    """A key of the schema, as `all_keys` returns it."""

    name: str  # full key, with `*` for the index of a list
    kind: Any  # type without None
    optional: bool  # null is allowed
    default: Any
    rule: KeyRule


@functools.cache
def all_keys() -> tuple[ConfigKey, ...]:
    """Return every key that has a `KeyRule`, in the order of the fields."""
    return tuple(_keys(Config, ""))


def _keys(section: Any, prefix: str) -> Iterator[ConfigKey]:
    hints = get_type_hints(section)
    for item in fields(section):
        name, kind, rule = prefix + item.name, hints[item.name], item.metadata.get("rule")
        optional = get_origin(kind) in (types.UnionType, Union) and type(None) in get_args(kind)
        if optional:
            [kind] = (part for part in get_args(kind) if part is not type(None))
        if rule is not None:
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            yield ConfigKey(name, kind, optional, default, rule)
        below = rule.described if rule is not None and rule.described else kind
        items = get_args(kind)[0] if get_origin(kind) is list else None
        if is_dataclass(below):
            yield from _keys(below, f"{name}.")
        elif is_dataclass(items):
            yield from _keys(items, f"{name}.*.")

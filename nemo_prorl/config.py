"""The typed schema of a run's configuration.  Standard library only.

Each key has one owner: what the trainer needs stands under `trainer.grpo`, what NeMo's model needs under `model`.
`model` and `exp_manager` hold NeMo's own keys, as their yaml in `conf/` lists them; everything else is typed here.
"""

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"  # OmegaConf's word for a key that must be given


@dataclass
class CorrectionConfig:
    """Correction of the gap between the engine's policy and the trainer's (`algorithms.correction`)."""

    kind: str = "tis"  # none | tis | icepop | sequence_mask
    cap: float = 2.0  # upper bound of the importance weight pi_old / pi_engine
    floor: float = 0.5  # icepop, sequence_mask: tokens or sequences below it are masked
    # mean absolute log-probability gap above which a step is reported; null: by precision (`lifecycle.tolerances`)
    alarm: float | None = None


@dataclass
class DynamicSamplingConfig:
    """Which groups are trained on, and how many may be drawn to find them (paper sec. 3.3)."""

    enabled: bool = True
    tolerance: float = 1e-6  # a group whose raw rewards differ by no more than this carries no signal
    max_draw_factor: float = 4.0  # at most this many times `prompts_per_step` prompts are judged in a step
    oversubscription: float = 1.0  # groups in flight per group that is expected to be needed
    margin: float = 0.0  # and this many standard deviations of the number kept more, whenever something is drawn
    max_staleness: int = 1  # groups made by weights older than this many steps are dropped


@dataclass
class ShapingConfig:
    """Rewards by length.  For the loss only: dynamic sampling and validation see the raw ones."""

    overlong_tokens: int = 0  # DAPO: the penalty builds up over the last so many tokens a response may have; 0: off
    overlong_penalty: float = 1.0  # taken off the longest
    cosine: bool = False  # the reward lies on a cosine from length 0 to the longest, in place of the raw one
    cosine_correct: list[float] = field(default_factory=lambda: [2.0, 1.0])  # of a right answer: at 0, at the longest
    cosine_wrong: list[float] = field(default_factory=lambda: [-10.0, 0.0])  # of a wrong one
    cosine_exceeded: float = -10.0  # of a response that was cut off at the longest
    cosine_every: int = 0  # schedule: of every so many steps the cosine shapes the last `cosine_for`; 0: all steps
    cosine_for: int = 0


@dataclass
class AdaptiveEntropyConfig:
    """An entropy bonus that switches itself on where the entropy falls below a target (paper sec. 5.4)."""

    enabled: bool = False
    target: float = 0.2  # nats a token
    step: float = 1e-4  # by which the coefficient moves, once a step
    maximum: float = 5e-3  # of the coefficient


@dataclass
class GRPOConfig:
    """One training step (paper sec. 3, 4.1); `recipe.md` of the paper's numbers is `algorithm=prorl`."""

    max_steps: int = 100  # in all, for a run directory
    prompts_per_step: int = 256
    samples_per_prompt: int = 16
    updates_per_step: int = 4  # mini-batches of prompts_per_step / updates_per_step prompts
    context_tokens: int = 8192  # prompt and response together
    max_response_tokens: int | None = None  # also bounded by context_tokens minus the prompt
    temperature: float = 1.2
    advantage: str = "group_norm"  # group_norm | leave_one_out | reinforce_pp_baseline
    aggregation: str = "token"  # token | sequence | constant (Dr.GRPO)
    clip_low: float = 0.2
    clip_high: float = 0.4
    dual_clip: float | None = None
    kl_coef: float = 1e-4
    kl_estimator: str = "k3"  # k1 | k2 | k3
    entropy_coef: float = 0.0  # fixed; or:
    adaptive_entropy: AdaptiveEntropyConfig = field(default_factory=AdaptiveEntropyConfig)
    unfinished_penalty: float = 0.0  # taken off the shaped reward of a response without eos
    unfinished_factor: float = 1.0  # its reward is multiplied by this first; 0: no reward
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    # Trainer and engines compute logits of 16-bit models in float32 (false: both round them to the model's dtype).
    float32_head: bool = True
    logprob_chunk_tokens: int = 4096  # rows of logits alive at a time
    logprob_chunk_words: int = 8192  # columns of them: words of the vocabulary
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    checkpoint_every: int = 20
    keep_checkpoints: int = 3  # the newest
    keep_best: int = 1  # beside them, those with the best validation
    checkpoint_budget_gb: float | None = None  # all of them together, in 10^9 bytes; the newest always stays
    async_checkpoints: bool = True  # the run goes on while one is written
    validate_every: int = 25
    validation_samples: int = 4
    validation_temperature: float = 0.6
    validation_top_p: float = 0.95
    save_rollout_groups: int = 4  # groups a step written to rollouts/; -1 writes all


@dataclass
class ResetRulesConfig:
    """When a rule asks for a hard reset or advises: `algorithms.reset_rules` has the formulas."""

    asks: list[str] = field(default_factory=lambda: ["validation_drop", "plateau", "kl_spike"])  # others only advise
    cooldown_steps: int = 50  # after a reset or the start no rule asks for one, after a finding not again
    drop_sigma: float = 4.6  # standard deviations of the noise; 1 in 500,000 by chance
    drop_min: float = 0.05  # smaller drops of a validation score are none
    drop_baseline: int = 10  # evaluations whose mean is the level before
    drop_confirm: int = 2  # evaluations that must show it
    plateau_steps: int = 300
    plateau_gain: float = 0.02  # less than this over plateau_steps, of the mean validation score
    plateau_sigma: float = 2.5
    kl_factor: float = 3.0  # times the median of the steps before
    kl_min: float = 0.001  # nats a token; below it nothing is a spike
    kl_sigma: float = 5.0
    kl_steps: int = 30  # steps that say what is usual
    truncation_rise: float = 0.1  # more responses cut off than in the run's best 10 steps; advises
    length_factor: float = 1.5  # times the length of the run's shortest 10 steps; advises
    entropy_share: float = 0.3  # of the entropy of the run's highest 10 steps; advises


@dataclass
class ResetsConfig:
    """Hard resets of reference policy and optimizer (paper sec. 3.3.1)."""

    mode: str = "manual"  # manual: at_steps only | advise: the rules tell, in the journal | auto: they reset
    at_steps: list[int] = field(default_factory=list)  # after the updates of these steps
    every: int | None = None  # and after each so many steps
    parts: str = "both"  # both; for ablations: reference | optimizer
    roll_back: bool = False  # to the weights of the best validation since the last reset, where they are kept
    lr_factor: float = 1.0  # the learning rate is multiplied by it at each reset
    lr_warmup_steps: int = 0  # steps over which it rises again after a reset, because the moments start anew
    # the mean absolute reference gap that the step after a reset may show; null: by precision (`lifecycle.tolerances`)
    kl_after_reset: float | None = None
    rules: ResetRulesConfig = field(default_factory=ResetRulesConfig)


@dataclass
class WarmupConfig:
    """Supervised steps before the reinforcement learning, from the prompts' own answers; 0 steps: none."""

    steps: int = 0
    batch_size: int = 64
    lr: float = 1e-3


@dataclass
class DeadlinesConfig:
    """Seconds that each wait may take; every error names its key."""

    startup_s: float = 300.0
    rollout_s: float = 3600.0
    reward_s: float = 600.0
    publish_s: float = 300.0
    collective_s: float = 1800.0
    stop_s: float = 30.0
    health_s: float = 120.0  # an engine or reward server that does not answer for so long is started again
    finish_step_s: float = 120.0  # asked to stop: a rollout that is not done by then is given up
    job_s: float | None = None  # the run stops by itself before so many seconds have passed since its job's start


@dataclass
class TrainerConfig:
    """PyTorch Lightning's trainer, as NeMo-Aligner builds it, and what trains with it."""

    num_nodes: int = 1
    devices: int = 1
    accelerator: str = "gpu"
    precision: Any = "bf16"
    gradient_clip_val: float = 1.0
    trace_steps: list[int] = field(default_factory=list)  # of these a timeline of all processes is written
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    resets: ResetsConfig = field(default_factory=ResetsConfig)
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)


@dataclass
class PretrainedConfig:
    """Where the policy's first weights come from."""

    restore_from_path: str | None = MISSING  # a Hugging Face folder; null (model=laptop): random weights


@dataclass
class RolloutConfig:
    """The rollout engines (vLLM in an environment of its own)."""

    python: str = ".venv/rollout/bin/python"
    engines: int = 1  # in all nodes together
    tensor_parallel_size: int = 1
    # Engines have GPUs (on a CPU: cores) on which nothing is trained, and generate a step's batch while the one before
    # trains.
    own_devices: bool = False
    dtype: str = "float32"
    threads: int = 1  # CPU engines only
    max_num_seqs: int = 256
    max_batched_tokens: int = 4096
    kv_cache_mb: int | None = None  # null: vLLM's own share of the device
    device_memory_gb: float | None = None  # of a GPU, in 10^9 bytes; null: nvidia-smi is asked; a CPU has none
    eager: bool = False
    sleep: int | None = None  # engines give their GPU's memory to the trainer: 1 weights to the host, 2 dropped; null
    max_restarts: int = 5  # of one engine within an hour


@dataclass
class RewardsConfig:
    """The reward server of a node."""

    workers: int = 1  # worker processes a node, shared out over the tasks in use
    max_infrastructure_failures: int = 8  # in a row; then the run stops and names the plugin
    unsafe_no_sandbox: bool = False  # run code of the model with all rights of this user where no sandbox holds
    plugins: dict[str, Any] = field(default_factory=dict)  # settings by plugin name


@dataclass
class DataSource:
    """One source of a blend: either a file of prompt records, or tasks made on the spot by a generator."""

    name: str = MISSING  # also its validation name
    path: str | None = None
    generator: str | None = None  # reasoning_gym:DATASET | arithmetic | code | stem | instructions
    options: dict[str, Any] = field(default_factory=dict)
    size: int | None = None  # records to generate, or the first that many of the file
    weight: float = 1.0
    seed: int = 0


@dataclass
class DataConfig:
    """What is trained on and what is held out."""

    train: list[DataSource] = field(default_factory=list)
    validation: list[DataSource] = field(default_factory=list)
    tasks: list[str] | None = None  # training takes records of these tasks only; null: of all
    retire_after: int | None = None  # a prompt solved by all responses, so many draws in a row, is drawn no more
    max_prompt_tokens: int | None = None  # longer training prompts are left out; null: an error where none fits
    folder: str = "prepared"  # of data=prorl: a folder for each source, as `prorl data prepare` writes them


@dataclass
class ChainConfig:
    """How a stage hangs on the one before it (paper sec. 4.2)."""

    after: str | None = None  # the stage before; its run directory lies beside this run's
    start_from: str | None = None  # its run directory or one of its checkpoints, where it lies elsewhere
    hard_reset: bool = True  # begin with one
    step_scale: float = 1.0  # of the stages' steps; a cluster's
    long_context_tokens: int = 16384  # the context of run 8; a cluster's


@dataclass
class LaunchConfig:
    """Starting the run's processes, above all by Slurm."""

    env: dict[str, str] = field(default_factory=dict)  # of all of them; what the environment holds already wins
    attempts: int = 3  # so many in a row without a new checkpoint, and a job ends instead of starting again


@dataclass
class Config:
    """The whole configuration of a run."""

    run_dir: str = "runs/laptop"
    stage: str = "none"  # set by the group stage=run1..run8
    seed: int = 1
    deterministic: bool = False
    on_event: str | None = None  # a command called with each alarm, reset and failure
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    model: dict[str, Any] = field(default_factory=dict)
    pretrained_checkpoint: PretrainedConfig = field(default_factory=PretrainedConfig)
    exp_manager: dict[str, Any] = field(default_factory=dict)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

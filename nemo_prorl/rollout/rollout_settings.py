"""The configuration values that the collector of batches needs."""

from dataclasses import dataclass, field

from nemo_prorl.config import Config, DynamicSamplingConfig
from nemo_prorl.rollout.blocks import block_draws

GRACE_S = 5.0  # a reward client answers by its deadline, with an infrastructure failure if need be; else it hangs


@dataclass(frozen=True)
class RolloutSettings:
    """Of one run.  Seconds are deadlines."""

    run_seed: int
    prompts_per_step: int
    samples_per_prompt: int
    temperature: float
    context_tokens: int
    max_response_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    max_infrastructure_failures: int = 8
    rollout_s: float = 3600.0
    reward_s: float = 600.0
    publish_s: float = 300.0
    startup_s: float = 900.0
    sleep: int | None = None  # level; None: engines stay awake
    own_devices: bool = False  # the trainer may work while engines do
    block_draws: int = 1  # of what the trainer computes together (`blocks`)

    @property
    def longest_collection_s(self) -> float:
        """By the deadlines of what a collection waits for."""
        return self.rollout_s + self.reward_s + GRACE_S + self.publish_s + self.startup_s

    @classmethod
    def from_config(cls, config: Config, stop_token_ids: tuple[int, ...] | None = None) -> "RolloutSettings":
        grpo, deadlines, model = config.trainer.grpo, config.trainer.deadlines, config.model
        ranks = config.trainer.num_nodes * config.trainer.devices
        stages = model["pipeline_model_parallel_size"]
        ranks //= model["tensor_model_parallel_size"] * stages
        own = config.rollout.own_devices
        return cls(
            run_seed=config.seed,
            prompts_per_step=grpo.prompts_per_step,
            samples_per_prompt=grpo.samples_per_prompt,
            temperature=grpo.temperature,
            context_tokens=grpo.context_tokens,
            max_response_tokens=grpo.max_response_tokens,
            stop_token_ids=stop_token_ids,
            dynamic_sampling=grpo.dynamic_sampling,
            max_infrastructure_failures=config.rewards.max_infrastructure_failures,
            rollout_s=deadlines.rollout_s,
            reward_s=deadlines.reward_s,
            publish_s=deadlines.publish_s,
            startup_s=deadlines.startup_s,
            sleep=config.rollout.sleep,
            own_devices=own,
            block_draws=1 if own else block_draws(ranks, grpo.samples_per_prompt, stages),
        )

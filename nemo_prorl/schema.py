"""Annotations for the types of documented file formats: JSON Schema constraints that a type hint cannot express.

`setup/schemas.py` generates docs/schemas from the types; the docstring below a field becomes its description.  This
file uses the standard library only and runs on Python 3.9, because the script of a Slurm job imports it.
"""

from __future__ import annotations

from typing import Annotated, Any


class Constraint:
    """Keywords of JSON Schema for a value, such as `minimum`."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> Any:
        return {**handler(core_schema), **self.keywords}


class JsonOf:
    """An annotation: the value is a JSON object with the fields of the dataclass `kind`."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return handler.generate_schema(self.kind)


# Names of the metrics in metrics.jsonl by what stands before the last "/"; TASK also is the name of a source, or `all`.
# docs/reference/metrics.md explains each.
METRICS = {
    "": "kl entropy",
    **dict.fromkeys(("reward", "reward_shaped", "keep_rate", "solved", "unsolved", "tied", "validation"), "TASK"),
    **dict.fromkeys(("response_tokens", "truncated", "repetition", "kl", "entropy"), "TASK"),
    **{f"canaries/{name}": "TASK" for name in ("right", "wrong", "false_accepts", "false_rejects")},
    **{f"second/{name}": "TASK" for name in ("judged", "disagreed")},
    "shaping": "unfinished overlong cosine",
    "rollout": "groups truncated repetition response_tokens masked drawn carried stale surplus"
    " generated_tokens staleness",
    "data": "retired",
    "stale_gap": "tokens share mean_abs max_abs mean_k3",
    "engine_gap": "tokens mean_abs max_abs mean_k3 mean_ratio p999"
    " mean_abs_quarter1 mean_abs_quarter2 mean_abs_quarter3 mean_abs_quarter4",
    "correction": "tokens mean_abs max_abs mean_k3 fraction_capped fraction_masked",
    "policy": "loss grad_norm max_grad_norm surrogate kl approx_kl weight ratio min_ratio max_ratio max_skipped"
    " clipped_high clipped_low dual_clipped nonfinite lr entropy_coef padding",
    "time": "publish rollout logprobs advantages updates ahead validate step",
    "time/ahead": "engines_wait_s",
    "time/ledger": "seconds",
    "time/step": "tokens_per_s_per_device",
    "time/updates": "tokens tflops_per_device mfu",
    "time/rollout": "engine_s reward_open_s reward_wait_s sleep_s tokens_per_s responses tail_s tail_responses idle_s"
    " lost_s preemptions",
    "system": "rank_gb engine_gb rewards_gb supervisor_gb free_gb shm_gb run_dir_gb open_files threads max_shapes"
    " engine_kv_cache_peak",
}

Count = Annotated[int, Constraint(minimum=0)]
Number = Annotated[int, Constraint(minimum=1)]
Share = Annotated[float, Constraint(minimum=0, maximum=1)]
Amount = Annotated[float, Constraint(minimum=0)]
Sha256 = Annotated[str, Constraint(pattern="^[0-9a-f]{64}$")]
Text = Annotated[str, Constraint(pattern=r"\S")]
Texts = Annotated[list[Text], Constraint(minItems=1)]
Time = Annotated[float, Constraint(description="seconds since 1970, UTC")]

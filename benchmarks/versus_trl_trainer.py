"""TRL's side of benchmarks/versus_trl.py, in TRL's environment: trains GRPOTrainer on a file of prompt records.

The first argument is a JSON file (see `versus_trl.trl_job`).  Standard output: a JSON object for each rollout step,
that is `updates` optimizer steps: wall `seconds` since the previous step, `tokens` generated, `reward`, and the seconds
of its parts.  Rewards come from this project's own plugin, called in this process.  Under torchrun, accelerate gives
each process a share of the prompts.  Rank 0 prints tokens and rewards of all ranks, but only its own parts.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "prorl-sandbox"), *map(str, (ROOT / "reward_plugins").iterdir())]

from nemo_prorl.files import read_objects  # noqa: E402
from nemo_prorl.rewards.interface import RewardRequest, judge  # noqa: E402

PARTS = {
    "_generate_single_turn": "generate",
    "_calculate_rewards": "rewards",
    "_get_per_token_logps_and_entropies": "logprobs",  # policy and reference, before the updates
    "training_step": "updates",
}


def timed(trainer: Any, spent: dict[str, float]) -> None:
    """Add the seconds of the trainer's PARTS to `spent`.  Time in a nested part counts only for the nested part."""
    inside: list[float] = []

    def wrap(method: str, part: str) -> None:
        original = getattr(trainer, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            inside.append(0.0)
            try:
                return original(*args, **kwargs)
            finally:
                seconds = time.monotonic() - began
                own = seconds - inside.pop()
                if part == "logprobs" and sys._getframe(1).f_code.co_name == "_compute_loss":
                    spent["updates"] += own  # the forward pass of an update
                else:
                    spent[part] += own
                if inside:
                    inside[-1] += seconds

        setattr(trainer, method, call)

    for method, part in PARTS.items():
        wrap(method, part)


def arguments(cfg: dict[str, Any], folder: str) -> Any:
    """Return a GRPOConfig with this project's settings, as far as TRL has them, and nothing else that takes time."""
    from trl import GRPOConfig  # type: ignore[import-not-found]

    rows = cfg["prompts"] * cfg["samples"] // cfg["updates"] // cfg["processes"]
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo" if cfg["processes"] > 1 else None,
        bf16=cfg["precision"] == "bf16",
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        seed=cfg["seed"],
        max_steps=cfg["steps"] * cfg["updates"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        steps_per_generation=cfg["updates"],
        num_iterations=1,
        num_generations=cfg["samples"],
        max_completion_length=cfg["max_tokens"],
        temperature=cfg["temperature"],
        top_p=1.0,
        top_k=0,
        learning_rate=cfg["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.01,
        max_grad_norm=1.0,
        beta=cfg["kl_coef"],
        epsilon=0.2,
        epsilon_high=0.4,
        loss_type="dapo",  # denominator: all tokens of the update
        scale_rewards="group",
        **cfg["options"],
    )


def plugin_named(name: str) -> Any:
    """Return one of this project's reward plugins; only its own packages must be installed."""
    module = importlib.import_module(f"prorl_reward_{name}.plugin")
    return getattr(module, f"{name.capitalize()}Reward")()


def main() -> None:
    cfg = json.loads(Path(sys.argv[1]).read_text())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # TRL prints
    import torch
    import torch.distributed as dist
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(cfg["threads"])
    records = read_objects(Path(cfg["records"]))
    tokenizer = AutoTokenizer.from_pretrained(cfg["model"])
    model = AutoModelForCausalLM.from_pretrained(cfg["model"], dtype=torch.float32)
    plugin = plugin_named(cfg["plugin"])
    with contextlib.suppress(ModuleNotFoundError):  # langdetect, which no prompt here needs
        plugin.prepare()
    spent: dict[str, float] = defaultdict(float)
    step: dict[str, Any] = {"tokens": 0, "rewards": [], "truncated": 0, "began": time.monotonic()}

    def reward(prompts: Any, completions: list[str], completion_ids: Any, record: list[str], **_: Any) -> list[float]:
        scores = []
        for text, ids, line in zip(completions, completion_ids, record, strict=True):
            finished = int(ids[-1]) == tokenizer.eos_token_id
            request = RewardRequest.from_json({**json.loads(line), "response": text, "finished": finished})
            scores.append(judge(plugin, request)["score"] or 0.0)
            step["tokens"] += len(ids)
            step["truncated"] += not finished
        step["rewards"] += scores
        return scores

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % cfg["updates"]:
                return
            now = time.monotonic()
            own = [now - step["began"], now - started, step["tokens"], sum(step["rewards"]), step["truncated"]]
            ranks = [own]
            if dist.is_initialized():
                ranks = [own] * dist.get_world_size()
                dist.all_gather_object(ranks, own)
            responses = cfg["prompts"] * cfg["samples"]
            line = {
                "seconds": ranks[0][0],
                "tokens": sum(rank[2] for rank in ranks),
                "reward": sum(rank[3] for rank in ranks) / responses,
                "truncated": sum(rank[4] for rank in ranks) / responses,
                "parts": dict(spent),
            }
            if state.is_world_process_zero:
                out.write(json.dumps(line) + "\n")
            spent.clear()
            step.update(tokens=0, rewards=[], truncated=0, began=now)
            if cfg.get("limit_s") and ranks[0][1] >= cfg["limit_s"]:
                control.should_training_stop = True

    dataset = Dataset.from_list([{"prompt": r["prompt"], "record": json.dumps(r)} for r in records])
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(cfg, str(Path(sys.argv[1]).parent)),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    timed(trainer, spent)
    started = step["began"] = time.monotonic()
    trainer.train()
    out.flush()
    os._exit(0)  # torch's process groups may abort at Python's exit; all results are written


if __name__ == "__main__":
    main()

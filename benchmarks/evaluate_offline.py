"""Measures vLLM's own offline throughput for benchmarks/evaluate.py, in the rollout environment.

The first argument is a JSON file: `model`, `prompts` (token ids), `samples`, `temperature`, `top_p`, `max_tokens` (one
per prompt), `stop`, `threads`, `eager`, and options of the engine's server.  The second argument matters only for
vLLM's CPU build: `ours` adds the server's `cpu_options`; `default` keeps vLLM's own values.  Each line on standard
input is a seed, or `none` to draw without seeds, as vLLM does by default.  The answer to each line is a line of JSON:
`seconds`, and the number of generated `tokens`.
"""

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nemo_prorl.rollout.engine.setup import cpu_options, is_cpu_build, set_environment


def main() -> None:
    cfg = json.loads(Path(sys.argv[1]).read_text())
    set_environment(cfg["threads"], cfg["eager"])
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM may print
    from vllm import LLM, SamplingParams

    optional: dict[str, Any] = {} if cfg["kv_mb"] is None else {"kv_cache_memory_bytes": cfg["kv_mb"] << 20}
    if is_cpu_build() and sys.argv[2] == "ours":
        optional |= cpu_options(cfg["eager"])
    llm = LLM(
        model=cfg["model"],
        dtype=cfg["dtype"],
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=cfg["context"],
        max_num_seqs=cfg["max_num_seqs"],
        max_num_batched_tokens=max(cfg["max_batched_tokens"], cfg["context"]),
        enforce_eager=cfg["eager"],
        enable_prefix_caching=True,
        disable_log_stats=True,
        **optional,
    )

    def params(seed: int | None, n: int, most: int) -> Any:
        return SamplingParams(
            n=n,
            temperature=cfg["temperature"],
            top_p=cfg["top_p"],
            max_tokens=most,
            stop_token_ids=cfg["stop"],
            ignore_eos=True,
            seed=seed,
            detokenize=False,
        )

    out.write("ready\n")
    for line in sys.stdin:
        prompts, sampling = [], []
        for ids, most in zip(cfg["prompts"], cfg["max_tokens"], strict=True):
            if line.strip() == "none":
                prompts.append({"prompt_token_ids": ids})
                sampling.append(params(None, cfg["samples"], most))
            else:
                seeds = [Random(f"{line}/{len(prompts) + k}").getrandbits(63) for k in range(cfg["samples"])]
                prompts += [{"prompt_token_ids": ids}] * len(seeds)
                sampling += [params(seed, 1, most) for seed in seeds]
        began = time.monotonic()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - began
        tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        out.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")


if __name__ == "__main__":
    main()

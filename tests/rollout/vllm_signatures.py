"""Read from vLLM's sources what this project relies on, and write it as JSON.

    python -m tests.rollout.vllm_signatures VLLM_FOLDER > tests/rollout/vllm_signatures.json

The wheel for CPUs contains the sources of the GPU's path too: its worker, Model Runner V2 and its sampler, sleep and
reload.  They need Triton or CUDA to run, so they are parsed, never imported.  Only facts are kept: parameters, values
of constants, and a hash of each function's body, which says that the function must be read again.
"""

import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

VERSION = "0.32.0"
_LONGEST = 160  # characters of a recorded value
# File, then class ("": the module itself), then names: functions, constants, fields, or attributes of `self`.
WANTED: dict[str, dict[str, str]] = {
    # the worker of a GPU: `rollout/engine/weight_load.py` adds methods to it
    "v1/worker/gpu_worker.py": {
        "Worker": "__init__ sleep wake_up sleep_mode_backend reload_weights determine_available_memory get_model"
        " initialize_from_config compile_or_warm_up_model execute_model sample_tokens _init_workspace_and_model_runner"
        " _make_model_runner"
    },
    "v1/worker/worker_base.py": {"WorkerBase": "__init__ model_config", "WorkerWrapperBase": "init_worker"},
    "v1/worker/utils.py": {"": "request_memory"},
    "device_allocator/cumem.py": {"CuMemAllocator": "sleep wake_up"},
    "model_executor/model_loader/reload/inplace.py": {"": "reload_weights"},
    "model_executor/layers/logits_processor.py": {"LogitsProcessor": "_apply_head head_dtype"},
    "distributed/parallel_state.py": {"": "get_tensor_model_parallel_rank"},
    # Model Runner V2, and V1, the way back
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner": "__init__ get_model reload_weights profile_run add_requests finish_requests free_states"
        " update_requests prepare_inputs execute_model sample_tokens sample postprocess_sampled"
    },
    "v1/worker/gpu_model_runner.py": {"GPUModelRunner": "get_model reload_weights"},
    "config/vllm.py": {"VllmConfig": "use_v2_model_runner _get_v2_model_runner_unsupported_features"},
    # its sampler: benchmarks/sampler_v2.py runs it
    "v1/worker/gpu/sample/sampler.py": {"Sampler": "__init__ add_request apply_sampling_params sample _sample_random"},
    "v1/worker/gpu/sample/states.py": {
        "": "NO_LOGPROBS",
        "SamplingStates": "__init__ add_request apply_staged_writes apply_temperature get_top_k_top_p"
        " any_explicit_seed",
    },
    "v1/worker/gpu/sample/gumbel.py": {
        "": "gumbel_sample apply_temperature gumbel_block_argmax gumbel_noised_argmax murmur3_hash32 murmur3_uniform32"
        " _log1p_neg_stable _gumbel_sample_kernel _temperature_kernel"
    },
    "v1/worker/gpu/sample/logprob.py": {"": "compute_topk_scores compute_token_logprobs _topk_log_softmax_kernel"},
    "v1/sample/ops/topk_topp_sampler.py": {"": "apply_top_k_top_p flashinfer_sampler_supported"},
    "config/model.py": {"": "LogprobsMode PROCESSED_LOGPROBS_MODES"},
    # variables and options that this project sets
    "envs.py": {
        "": "VLLM_USE_V2_MODEL_RUNNER VLLM_USE_FLASHINFER_SAMPLER VLLM_BATCH_INVARIANT VLLM_ENABLE_V1_MULTIPROCESSING"
        " VLLM_CPU_OMP_THREADS_BIND VLLM_LOGGING_LEVEL VLLM_NO_USAGE_STATS VLLM_CACHE_ROOT"
    },
    "engine/arg_utils.py": {
        "EngineArgs": "model dtype skip_tokenizer_init generation_config logprobs_mode max_model_len max_num_seqs"
        " max_num_batched_tokens enforce_eager enable_prefix_caching tensor_parallel_size disable_log_stats"
        " worker_extension_cls scheduler_cls kv_cache_memory_bytes enable_sleep_mode gpu_memory_utilization"
        " hf_overrides async_scheduling enable_chunked_prefill block_size ir_op_priority"
    },
    "sampling_params.py": {
        "SamplingParams": "n temperature top_p max_tokens seed stop_token_ids ignore_eos logprobs flat_logprobs"
        " detokenize output_kind skip_clone"
    },
    # the engine and its scheduler: `vllm_internals/scheduler.py` extends it
    "v1/engine/async_llm.py": {
        "AsyncLLM": "from_engine_args generate sleep wake_up collective_rpc reset_prefix_cache update_weight_version"
        " get_weight_version get_num_unfinished_requests pause_generation resume_generation errored shutdown"
    },
    "v1/engine/core.py": {
        "EngineCore": "step step_with_batch_queue abort_requests sleep _attach_weight_version",
        "EngineCoreProc": "has_work pause_scheduler _pause_complete _send_abort_outputs _process_engine_step",
    },
    "v1/engine/output_processor.py": {"RequestState": "track_weight_version _weight_version_spans"},
    "v1/engine/__init__.py": {
        "EngineCoreOutput": "request_id new_token_ids new_logprobs finish_reason kv_transfer_params prefill_stats",
        "EngineCoreOutputs": "outputs weight_version finished_requests",
    },
    "v1/core/sched/scheduler.py": {
        "Scheduler": "__init__ schedule update_from_output finish_requests has_requests set_pause_state pause_state"
        " _update_request_with_output _preempt_request requests kv_cache_manager max_model_len"
    },
    "v1/core/sched/async_scheduler.py": {"AsyncScheduler": "_update_after_schedule _update_request_with_output"},
    "v1/core/sched/interface.py": {"PauseState": "UNPAUSED PAUSED_NEW PAUSED_ALL"},
    "v1/core/sched/output.py": {"SchedulerOutput": "num_scheduled_tokens total_num_scheduled_tokens"},
    "v1/core/kv_cache_manager.py": {"KVCacheManager": "usage"},
    "v1/request.py": {
        "Request": "append_output_token_ids sampling_params max_tokens num_prompt_tokens num_in_flight_tokens status"
        " client_index",
        "RequestStatus": "RUNNING FINISHED_ABORTED",
    },
    "v1/outputs.py": {
        "LogprobsLists": "logprob_token_ids logprobs sampled_token_ranks",
        "ModelRunnerOutput": "req_id_to_index sampled_token_ids logprobs",
    },
}
Facts = dict[str, str]


def facts(read: Callable[[str], str]) -> Facts:
    """Return {"file Class.name": fact} for all of `WANTED`; a name that is not there has the fact "gone".

    Args:
        read: returns the text of a file below vLLM's folder; raises OSError if there is no such file.
    """
    found: Facts = {}
    for file in WANTED:
        try:
            text: str | None = read(file)
        except OSError:
            text = None
        found |= _facts_of(file, text)
    return found


@functools.cache
def _facts_of(file: str, text: str | None) -> Facts:
    found: Facts = {}
    module = None if text is None else ast.parse(text)
    for owner, names in WANTED[file].items():
        scope = module if not owner or module is None else _class(module, owner)
        known = {} if scope is None else dict(_known(scope))
        for name in names.split():
            found[f"{file} {owner}.{name}".replace(" .", " ")] = known.get(name, "gone")
    return found


def moved(recorded: Facts, found: Facts) -> list[str]:
    """Return one line for each fact that is not as recorded."""
    return [
        f"{name}: recorded {recorded.get(name, 'nothing')}; found {found.get(name, 'nothing')}"
        for name in sorted(recorded.keys() | found.keys())
        if recorded.get(name) != found.get(name)
    ]


def of_folder(folder: Path) -> Facts:
    """Return the facts of an installed `vllm` folder."""
    return facts(lambda file: (folder / file).read_text())


def _class(module: ast.AST, name: str) -> ast.ClassDef | None:
    return next((node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == name), None)


def _known(scope: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield name and fact of all that a module or class defines; the last definition of a name counts."""
    pending = list(ast.iter_child_nodes(scope))
    for node in pending:
        if isinstance(node, ast.If | ast.Try):  # a module's names for type checkers are in an `if`
            pending += ast.iter_child_nodes(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _attributes(node) if isinstance(scope, ast.ClassDef) else ()
            yield node.name, f"({_short(ast.unparse(node.args))}) {_digest(node)}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), _short(ast.unparse(node))


def _attributes(function: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, f"an attribute of {getattr(function, 'name', '')}"


def _digest(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a short hash of decorators and body, without docstring and comments."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    text = "\n".join(ast.unparse(node) for node in (*function.decorator_list, *body))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _short(text: str) -> str:
    flat = re.sub(r"\s+", " ", text)
    return flat if len(flat) <= _LONGEST else f"{flat[:_LONGEST]}... {hashlib.sha256(flat.encode()).hexdigest()[:12]}"


if __name__ == "__main__":
    sys.stdout.write(json.dumps({VERSION: of_folder(Path(sys.argv[1]))}, indent=1) + "\n")

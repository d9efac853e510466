"""Time to publish a policy's weights through /dev/shm and to load them, compared with a plain copy of the same size.

    .venv/train/bin/python benchmarks/publication.py                  the 1.5B model in bf16: 3.6 GB per version
    .venv/train/bin/python benchmarks/publication.py --layers 7       fewer layers, for less memory
    ... --engine                    a real engine loads each version, too, with and without a check of what it holds
    ... --damages                   only: in which share of loads does the check find a damage of one matrix?

Policy: Megatron's GPTModel of conf/model/qwen2_1p5b.yaml with constant weights, exported as `Actor.export_weights` does
and written by `WeightStore`, as in a run.  Plain copies, each to a new file in /dev/shm: `write` of the model's tensors
without names and order, and `cp` of the published file.  All alternate; the store keeps two versions, as in a run.
Memory needed: four times the model's size (weights, two versions and a copy), or six times with --engine.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine import Engine
from machine import describe, libraries_on_stderr, seconds

SHM = Path("/dev/shm")
WORDS = 151_936


def config_of(layers: int) -> dict[str, Any]:
    """Return config.json of the model with at most `layers` layers."""
    from nemo_prorl.settings import load

    model = load(["cluster=h100_4x8", "pretrained_checkpoint.restore_from_path=null"]).model
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": WORDS,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": min(layers, model.num_layers),
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def build_policy(hf: dict[str, Any], meet: Path) -> Any:
    """Return Megatron's model in bf16 on one rank as `module`, and `export_weights()` as an actor has it.

    Args:
        hf: content of config.json.
        meet: path of a new file, with which torch.distributed sets up the process group.
    """
    import torch
    import torch.distributed as dist

    from nemo_prorl.policy.cpu import shims as cpu

    cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_prorl.policy.cpu.layers import layer_spec
    from nemo_prorl.policy.weights import Shape
    from nemo_prorl.policy.whole_weights import WholeWeights

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_qkv_bias=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    module = GPTModel(
        config,
        layer_spec(config),
        WORDS,
        128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    for parameter in module.parameters():
        parameter.data.fill_(0.01)  # so that the memory is allocated
    whole = WholeWeights(module, Shape.of(hf, WORDS))
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    return SimpleNamespace(module=module, export_weights=lambda: whole.gather(parameters))


def written(policy: Any, path: Path) -> None:
    """Write the bytes of all parameters to `path`, in the model's order and without names."""
    import torch

    with path.open("wb", buffering=0) as file:
        for parameter in policy.module.parameters():
            rest = memoryview(parameter.detach().contiguous().view(torch.uint8).numpy()).cast("B")
            while rest:
                rest = rest[file.write(rest) :]


def cpu_seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def without_checksums(path: Path, copy: Path) -> Path:
    """Copy a published file to `copy` without its checksums, which an engine then does not compare; return `copy`."""
    shutil.copyfile(path, copy)
    with copy.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        del header["__metadata__"]
        file.seek(8)
        file.write(json.dumps(header).encode().ljust(size))
    return copy


def start_engine(hf: dict[str, Any], folder: Path, store: Path, first: Path, threads: int, wait_s: float) -> Engine:
    """Start an engine for the model.  Its first weights are a copy of `first`, a file of the weight store."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(hf))
    shutil.copyfile(first, folder / "model" / "model.safetensors")
    sizes = {"kv_mb": 64, "max_model_len": 128, "max_num_seqs": 8, "max_batched_tokens": 256, "health_s": 600}
    return Engine(folder / "model", folder, store, wait_s, dtype="bfloat16", threads=threads, eager=True, **sizes)


def run(args: argparse.Namespace) -> Iterator[str]:
    import torch

    from nemo_prorl.rollout.checksums import published
    from nemo_prorl.rollout.weight_store import WeightStore

    torch.set_num_threads(args.threads)
    hf = config_of(args.layers)
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=SHM, prefix="prorl-benchmark-") as shm:
        folder, copy = Path(name), Path(shm) / "copy"
        with libraries_on_stderr():
            policy = build_policy(hf, folder / "meet")
        parameters = sum(p.numel() for p in policy.module.parameters())
        store = WeightStore(Path(shm) / "store")
        times: dict[str, list[float]] = {"publish": [], "write": [], "copy": [], "load": [], "unchecked": []}
        cpu: dict[str, list[float]] = {"load": [], "unchecked": []}
        for _ in range(2):  # two versions are kept, as in a run; the first also warms caches
            first = store.write(policy.export_weights(), _)
        size, engine = first.stat().st_size, None
        free = shutil.disk_usage(SHM).free
        yield (
            f"{parameters / 1e9:.2f}e9 parameters in bf16, {hf['num_hidden_layers']} layers, {size / 1e9:.2f} GB a"
            f" version; /dev/shm has {free / 1e9:.1f} GB left; {args.threads} thread(s)"
        )
        if args.engine:
            engine = start_engine(hf, folder, store.folder, first, args.threads, args.wait_s)
        for version in range(2, args.rounds + 2):
            times["publish"].append(seconds(lambda v=version: store.write(policy.export_weights(), v)))  # type: ignore[misc]
            times["write"].append(seconds(lambda: written(policy, copy)))
            copy.unlink()
            times["copy"].append(seconds(lambda v=version: subprocess.run(["cp", store.path_of(v), copy], check=True)))  # type: ignore[misc]
            copy.unlink()
            if engine is not None:
                unchecked = without_checksums(store.path_of(version), store.folder / "unchecked.safetensors")
                both = [("load", store.path_of(version)), ("unchecked", unchecked)]
                for key, file in both if version % 2 else reversed(both):  # the second load finds warm caches
                    before = engine.cpu_s()
                    times[key].append(seconds(lambda v=version, f=file: engine.load(f, v)))  # type: ignore[misc]
                    cpu[key].append(engine.cpu_s() - before)
                unchecked.unlink()
        if engine is not None:
            engine.close()
        exported = [cpu_seconds(lambda: [None for _ in policy.export_weights()]) for _ in range(3)]
        own = [cpu_seconds(lambda: [published(n, w, 1, w.dtype) for n, w in policy.export_weights()]) for _ in range(3)]
        store.remove()
    medians = {key: statistics.median(values) for key, values in times.items() if values}
    yield f"medians of {args.rounds} alternating rounds (least to most)"
    for key, label in (
        ("publish", "export and write"),
        ("write", "plain write"),
        ("copy", "cp"),
        ("load", "an engine loads it"),
        ("unchecked", "without the check"),
    ):
        if key in medians:
            spread = f"({min(times[key]):.2f} to {max(times[key]):.2f})"
            yield f"{label:20s} {medians[key]:7.2f} s  {size / medians[key] / 1e9:6.2f} GB/s  {spread}"
    export, check = statistics.median(exported), statistics.median(own) - statistics.median(exported)
    yield f"of publishing: {export:.2f} s of CPU time for the export, {check:.3f} s for checksums"
    if cpu["load"]:
        with_it, without = (statistics.median(cpu[key]) for key in ("load", "unchecked"))
        more = with_it / without - 1
        yield f"CPU time of a load: {with_it:.2f} s; without the check {without:.2f} s: {more:+.1%}"
    plain = {"write": "a plain write", "copy": "cp"}
    ratios = ", ".join(f"{medians['publish'] / medians[key]:.2f} times {name}" for key, name in plain.items())
    yield f"publication takes {ratios}"


def damages(hf: dict[str, Any], loads: int) -> Iterator[str]:
    """Yield the share of loads in which the check finds damages of a matrix, in each form in which engines hold it."""
    import torch
    from torch.nn import Module, Parameter
    from torch.nn.functional import linear

    from nemo_prorl.rollout.checksums import compare, held, published

    name, generator = "layer.weight", torch.Generator().manual_seed(1)
    yield f"share of {loads} loads that find a damage of one matrix of normal values (and the first of these loads)"
    for rows, width in ((hf["hidden_size"], hf["intermediate_size"]), (2 * hf["intermediate_size"], hf["hidden_size"])):
        for packed, dtype in ((False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float32)):
            weight = (0.02 * torch.randn(rows, width, generator=generator)).bfloat16()
            changed: dict[str, Any] = {"nothing": weight, "halves swapped": weight.roll(rows // 2, 0)}
            changed["rows shuffled"] = weight[torch.randperm(rows, generator=generator)]
            order = torch.arange(width)
            order[[width // 2, width // 2 + 9]] = order[[width // 2 + 9, width // 2]]
            changed |= {"two columns swapped": weight[:, order], "a column zero": weight.clone()}
            changed["a column zero"][:, width // 2] = 0.0
            for text, more in (("one value by 1 sd", 0.02), ("one value by 0.1 sd", 0.002)):
                changed[text] = weight.float()
                changed[text][7, width // 2] += more
            found: dict[str, list[bool]] = {text: [] for text in changed}
            for version in range(loads):
                expected = {name: published(name, weight, version, dtype)}
                for text, values in changed.items():
                    layer: Any = Module()
                    holds = values.to(dtype)
                    layer.weight = Parameter(holds[:0, :0] if packed else holds)
                    if packed:  # as vLLM's CPU build, which can only apply a matrix
                        layer.input_size_per_partition = width
                        layer.cpu_linear = lambda x, _, bias, holds=holds: linear(x, holds, bias)
                    model: Any = Module()
                    model.layer = layer
                    wrong, _ = compare(expected, [list(held(model, {name: (rows, width)}, version, dtype, 0))])
                    found[text].append(bool(wrong))
            yield (
                f"{rows} x {width}, {str(dtype)[6:]}, {'can only be applied' if packed else 'readable'}: "
                + ", ".join(
                    f"{text} {sum(hits) / loads:.0%} ({hits.index(True) + 1 if any(hits) else '-'})"
                    for text, hits in found.items()
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine", action="store_true")
    parser.add_argument("--damages", action="store_true")
    parser.add_argument(
        "--wait-s", type=float, default=900.0, help="maximum seconds until the engine is ready; default: 900"
    )
    args = parser.parse_args()
    sys.stdout.write(describe() + "\n")
    for line in damages(config_of(1), 20) if args.damages else run(args):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

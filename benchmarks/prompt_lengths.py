"""Seconds to compare the lengths of 130,000 prompts with the limits of run1, first and again from the cache.

    .venv/train/bin/python benchmarks/prompt_lengths.py                         as in benchmarks/results
    .venv/train/bin/python benchmarks/prompt_lengths.py --tokenizer FOLDER      with the tokenizer in FOLDER

Data: files as data=prorl names them.  Puzzles are made by the project's generator, `--each` of every task of
`prorl data prepare reasoning-gym`, and repeated under other ids until there are 37,000.  The other sources are
stand-ins: pieces of the text and of the programs of Python's library, with assumed log-normal lengths.  So the numbers
of records that the limit leaves out mean something for puzzles only.

Without --tokenizer, a byte-level BPE with 151,643 words is trained at once on Python's library and its packages: as
large as that of the paper's model, with the same splitting rule and a template of the same length.
"""

import argparse
import json
import random
import resource
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from machine import describe, libraries_on_stderr

PUZZLES = 37_000
# source: task, records, median characters (assumed) and their spread (sigma of the logarithm), truth
STAND_INS: dict[str, tuple[str, int, int, float, dict[str, Any]]] = {
    "deepscaler": ("math", 40_000, 260, 0.6, {"answer": "2"}),
    "eurus2-rl": ("code", 24_000, 1300, 0.6, {"asserts": ["assert f() == 1"]}),
    "scp-116k": ("stem", 25_000, 320, 0.6, {"answer": "2"}),
    "instructions": (
        "instructions",
        10_000,
        450,
        0.8,
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ),
}
HELD_OUT = ("aime24", "codeforces", "gpqa", "ifeval", "graph_color")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|User|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
SHAPE = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
}


def make_tokenizer(folder: Path, megabytes: int) -> None:
    """Train a byte-level BPE with the number of words of the paper's model, and save it with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files, size = [], 0
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))[::3]:
        files.append(str(file))
        size += file.stat().st_size
        if size > megabytes * 1e6:
            break
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|User|>", "<|Assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=151_643, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train(files, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=TEMPLATE)
    fast.save_pretrained(folder)


def make_data(folder: Path, each: int) -> None:
    """Write the files of data=prorl."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(file.read_text(errors="replace") for file in library)
    chosen = random.Random(1)

    def record(source: str, k: int, task: str, prompt: str, truth: dict[str, Any]) -> dict[str, Any]:
        return {"id": f"{source}-{k}", "task": task, "prompt": [{"role": "user", "content": prompt}], "truth": truth}

    def stand_ins(source: str) -> Iterator[dict[str, Any]]:
        task, number, median, spread, truth = STAND_INS[source]
        for k in range(number):
            size = int(median * chosen.lognormvariate(0, spread))
            start = chosen.randrange(len(text) - size)
            yield record(source, k, task, f"{k}: {text[start : start + size]}", truth)

    for source in STAND_INS:
        _write(folder / source / "train.jsonl", stand_ins(source))
    for source in HELD_OUT:
        short = (record(source, k, "math", f"{source} {k}?", {"answer": "1"}) for k in range(100))
        _write(folder / source / "validation.jsonl", short)
    puzzles = list(_puzzles(each))
    many = (
        record("reasoning-gym", k, "puzzles", f"{puzzles[k % len(puzzles)]['prompt']}\n({k})", puzzle["truth"])
        for k in range(PUZZLES)
        for puzzle in [puzzles[k % len(puzzles)]]
    )
    _write(folder / "reasoning-gym" / "train.jsonl", many)


def _puzzles(each: int) -> Iterator[dict[str, Any]]:
    from nemo_prorl.config import DataConfig, DataSource
    from nemo_prorl.data.laptop.generators import generate
    from nemo_prorl.data.prepare.puzzles import TASKS_FILE, read_tasks

    for name, options in read_tasks(TASKS_FILE).items():
        source = DataSource(name=name, generator=f"reasoning_gym:{name}", size=each, options=options)
        yield from json.loads(json.dumps(generate(source, templates=DataConfig().templates)))


def _write(file: Path, records: Iterator[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True)
    with file.open("w") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)


def timed(what: str, work: Callable[[], Any]) -> Any:
    """Do the work; print its seconds, and the processor's seconds of all its threads."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    found = work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stdout.write(f"{what:<44} {time.perf_counter() - began:7.1f} s   {busy:7.1f} s of processor\n")
    sys.stdout.flush()
    return found


def measure(folder: Path, model: Path) -> None:
    from nemo_prorl import settings
    from nemo_prorl.data.blend import load_sources, of_tasks
    from nemo_prorl.data.lengths import PromptLengths, fit
    from nemo_prorl.launcher.run_data import check_rewards

    words = ["cluster=h100_4x8", f"data.folder={folder}", f"run_dir={folder / 'run'}"]
    words.append(f"pretrained_checkpoint.restore_from_path={model}")
    cfg = settings.load_run([*words, "stage=run4"])
    loaded = timed("read the files and check the fields", partial(load_sources, cfg.data))
    used = loaded._replace(train=of_tasks(loaded.train, cfg.data))
    timed("check truths (reward plugins)", partial(check_rewards, cfg, [*used.train, *used.validation]))
    timed("lengths, first", lambda: fit(cfg, used, PromptLengths(model, cfg.data)))
    fitted = timed("lengths, again from the cache", lambda: fit(cfg, used, PromptLengths(model, cfg.data)))
    limit = cfg.data.max_prompt_tokens
    sys.stdout.write(f"\nleft out, with more than {limit:,} tokens; the longest that is kept:\n")
    for one in fitted.sources:
        if one.part == "train":
            sys.stdout.write(f"  {one.source:<14} {one.share:<26} {one.longest:,} tokens\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the check of 130,000 prompts' lengths.")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="folder; trained there if missing")
    parser.add_argument("--each", type=int, default=24, help="puzzles generated per task; default 24")
    parser.add_argument("--megabytes", type=int, default=60, help="text that the tokenizer is trained on; default 60")
    arguments = parser.parse_args()
    sys.stdout.write(f"{describe()}\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder, model = Path(temporary), Path(temporary) / "model"
        with libraries_on_stderr():
            kept = arguments.tokenizer or folder / "tokenizer"
            if not kept.is_dir():
                make_tokenizer(kept, arguments.megabytes)
            model.mkdir()
            for file in (*kept.glob("*token*"), *kept.glob("*.jinja")):
                (model / file.name).write_bytes(file.read_bytes())
            (model / "config.json").write_text(json.dumps(SHAPE))
            (model / "model.safetensors").touch()
            make_data(folder, arguments.each)
        words = len(json.loads((model / "tokenizer.json").read_text())["model"]["vocab"])
        sys.stdout.write(f"tokenizer: {words:,} words; puzzles: {arguments.each} of each task, repeated\n\n")
        measure(folder, model)


if __name__ == "__main__":
    main()

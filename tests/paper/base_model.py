"""A stand-in of the paper's base model: DeepSeek-R1-Distill-Qwen-1.5B in small, with its tokens and its way of asking.

Same architecture (Qwen2: grouped queries, biases of q, k and v, SwiGLU, an output matrix of its own) and the same chat
template as the published revision of February 2025, whose prompts end in `<think>`.  It is taught the form of answers
of the five domains in half a minute, so that some responses are right by luck and groups carry a signal.  It shows that
the way works; it shows nothing about what a model of 1.5 billion parameters learns.
"""
# ruff: noqa: RUF001 (the signs of DeepSeek's tokens)

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.paper_model import CONFIG

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'] + eos_token }}{% else %}{{ m['content'] }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,  # heads of 32 values: vLLM has no kernel for smaller ones on a CPU
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
_VOCABULARY = 2000
_LESSONS, _ROWS, _LAST_TOKENS = 250, 8, (8, 32)  # updates; rows of each; shown tokens of a prompt, least and most
_LEARNING_RATE = 3e-3  # at the first update; it falls to zero


def write(folder: Path, prompts: Sequence[dict[str, Any]], seed: int = 1) -> Path:
    """Write the model folder: tokenizer (trained on the prompts), config.json, model.safetensors; return it.

    Args:
        prompts: prompt records, whose tasks say which form of an answer the model is taught for them.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer([_text(record) for record in prompts])
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        **{key: value for key, value in (CONFIG | SHAPE).items() if key != "model_type"}
        | {"vocab_size": len(tokenizer)},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    _teach(model, tokenizer, prompts, random.Random(seed))
    model.save_pretrained(folder, safe_serialization=True)
    settings = json.loads((folder / "config.json").read_text())
    assert settings["tie_word_embeddings"] is False
    return folder


def _text(record: dict[str, Any]) -> str:
    prompt = record["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def _tokenizer(texts: Sequence[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*texts, *(_answer(task, random.Random(0)) for task in _FORMS)], trainer)
    backend.add_tokens(["<think>", "</think>"])
    backend.add_tokens([f"<unused{k}>" for k in range(-backend.get_vocab_size() % 64)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=EOS)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


_FORMS = {
    "math": "The final answer is \\boxed{{{number}}}.",
    "stem": "The final answer is \\boxed{{{letter}}}.",
    "code": "```python\nprint({number})\n```",
    "puzzles": "<answer>{number}</answer>",
    "instructions": "{word} {word2} {word}",
}
_WORDS = ("yes", "no", "well", "so", "this", "is", "the", "answer", "and")


def _answer(task: str, draw: random.Random) -> str:
    """Return a target response: a short thought, then an answer in the form of the task, right by luck at best."""
    words = {"word": draw.choice(_WORDS), "word2": draw.choice(_WORDS)}
    answer = _FORMS[task].format(number=draw.randrange(10), letter=draw.choice("ABCD"), **words)
    return f"{draw.choice(_WORDS)}\n</think>\n\n{answer}"


def _teach(model: Any, tokenizer: Any, prompts: Sequence[dict[str, Any]], draw: random.Random) -> None:
    """Show the model the end of a prompt and a response, again and again; the prompts' ends name the form."""
    import torch

    torch.set_num_threads(1)  # the matrices are tiny
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    for lesson in range(_LESSONS):
        optimizer.param_groups[0]["lr"] = _LEARNING_RATE * (1 - lesson / _LESSONS)
        shown = draw.randint(*_LAST_TOKENS)
        rows, starts = [], []
        for record in draw.choices(prompts, k=_ROWS):
            messages = [{"role": "user", "content": _text(record)}]
            asked = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))[-shown:]
            target = tokenizer.encode(_answer(record["task"], draw), add_special_tokens=False)
            rows.append([*asked, *target, tokenizer.eos_token_id])
            starts.append(len(asked))
        longest = max(map(len, rows))
        ids = torch.tensor([row + [tokenizer.eos_token_id] * (longest - len(row)) for row in rows])
        labels = torch.tensor(
            [
                [-100] * start + row[start:] + [-100] * (longest - len(row))
                for row, start in zip(rows, starts, strict=True)
            ]
        )
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

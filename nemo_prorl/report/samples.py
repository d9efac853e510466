"""Selection of stored responses for the page: spread over steps and tasks, with the best and worst of each group."""

import functools
import json
from itertools import chain, groupby, zip_longest
from pathlib import Path
from typing import Any

from nemo_prorl.files import objects_in
from nemo_prorl.report.read import Curve, RunRecord, number, part_of

PER_GROUP = 4
_FILE_BYTES = 64 * 2**20  # maximum bytes read from a step's file
_TEXT = 6000  # characters of a prompt or response; the middle of a longer one is left out
_TRUTH = 1000
_PAGE_TEXT = 3_000_000  # characters of all responses and prompts of a page


def samples(curve: Curve, limit: int) -> dict[str, Any]:
    """Return stored responses of a curve, and their groups, for the page.

    Args:
        limit: maximum number of responses; -1 means all that fit into a page.

    Returns:
        groups: prompt, truth, and number and mean score of all responses, for each group.
        items: the responses.
        stored, read: number of steps with stored responses, and number of steps that were read.
        left_out: number of responses that were read but are not in `items`.
    """
    steps = [(stage, step) for stage, run in enumerate(curve.runs) for step in run.rollouts]
    chosen = steps if limit < 0 else _spread(steps, max(1, limit // (2 * PER_GROUP)) if limit else 0)
    per_step = None if limit < 0 else max(1, limit // max(1, len(chosen)))
    groups: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    seen, room = 0, _PAGE_TEXT
    for stage, step in reversed(chosen):  # newest first
        run, offset = curve.runs[stage], curve.offsets[stage]
        stored_groups, number_of_responses = _of_step(run, step, per_step)
        seen += number_of_responses
        for group, responses in stored_groups:
            size = sum(len(item["response"]) for item in responses) + len(group["prompt"]) + len(group["truth"])
            if size <= room:
                room -= size
                items += [{"g": len(groups), **shaping(run, item)} for item in responses]
                groups.append({"stage": run.name, "own_step": step, "step": offset + step, **group})
    left_out = seen - len(items)
    return {"groups": groups, "items": items, "stored": len(steps), "read": len(chosen), "left_out": left_out}


def _spread(steps: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return `count` of the steps, at equal distances in the list; a step is (number of the stage, step in the stage).

    The last step is always included, and the first step if `count` is 2 or more.
    """
    if len(steps) <= count:
        return steps
    if count <= 1:
        return steps[-1:] if count else []
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


Group = tuple[dict[str, Any], list[dict[str, Any]]]  # the common part of a prompt's responses, and the responses


def _of_step(run: RunRecord, step: int, limit: int | None) -> tuple[list[Group], int]:
    path = run.rollouts[step]
    try:
        state = path.stat()
        return _read(path, state.st_mtime_ns, state.st_size, limit)
    except OSError as error:
        run.problems.append(f"rollouts/{path.name}: cannot be read: {error.strerror}")
        return [], 0


@functools.lru_cache(maxsize=256)  # a live report reads the same files repeatedly
def _read(path: Path, _changed: int, _size: int, limit: int | None) -> tuple[list[Group], int]:
    """Return the groups in the file of a step, and the number of responses read from the file.

    The returned groups have at most `limit` responses in all; None: no limit.  `_changed` (time of the last change) and
    `_size` are arguments only so that the cache reads a changed file again.
    """
    with path.open("rb") as file:
        requests = [line for line in objects_in(file.read(_FILE_BYTES)) if isinstance(line.get("response"), str)]
    stored = [_group(list(lines)) for _, lines in groupby(requests, key=lambda line: str(line.get("id")))]
    count = sum(len(items) for _, items in stored)
    if limit is None:
        return stored, count
    by_task = {group["task"]: [pair for pair in stored if pair[0]["task"] == group["task"]] for group, _ in stored}
    kept: list[Group] = []
    for group, items in filter(None, chain.from_iterable(zip_longest(*by_task.values()))):  # a group per task in turn
        if limit > 0:
            kept.append((group, _telling(items, min(PER_GROUP, limit))))
            limit -= len(kept[-1][1])
    return kept, count


def _group(lines: list[dict[str, Any]]) -> Group:
    items = [_item(line) for line in lines]
    scores = [item["score"] for item in items if item["score"] is not None]
    first = lines[0]
    group = {
        **described(first, _TEXT),
        "source": cut(str(first.get("source") or ""), 100),
        "n": len(lines),
        "trained": first["trained"] if isinstance(first.get("trained"), bool) else None,
        "mean": number(sum(scores) / len(scores)) if scores else None,
    }
    return group, items


def described(line: dict[str, Any], length: int) -> dict[str, str]:
    """Return the texts of a stored request: id, task, prompt (at most `length` characters) and truth."""
    truth = line.get("truth")
    return {
        "id": cut(str(line.get("id", "?")), 200),
        "task": cut(str(line.get("task", "?")), 100),
        "prompt": cut(_prompt_text(line.get("prompt")), length),
        "truth": "" if truth is None else cut(json.dumps(truth, ensure_ascii=False), _TRUTH),
    }


def result_of(verdict: dict[str, Any]) -> dict[str, Any]:
    """Return score, correctness and detail of a stored verdict."""
    correct = verdict.get("correct")
    return {
        "score": number(verdict.get("score")),
        "correct": correct if isinstance(correct, bool) else None,
        "detail": str(verdict.get("detail") or "")[:500],
    }


def _prompt_text(prompt: Any) -> str:
    """Return a prompt as text, each message of a list with its role in brackets above it."""
    if isinstance(prompt, list):
        messages = [m for m in prompt if isinstance(m, dict)]
        return "\n\n".join(f"[{m.get('role', '?')}]\n{m.get('content', '')}" for m in messages)
    return prompt if isinstance(prompt, str) else ""


def _item(line: dict[str, Any]) -> dict[str, Any]:
    verdict = part_of(line, "verdict")
    parts = part_of(verdict, "parts")
    return {
        **result_of(verdict),
        "response": cut(line["response"], _TEXT),
        "characters": len(line["response"]),
        "finished": line["finished"] if isinstance(line.get("finished"), bool) else None,
        "failure": str(verdict["failure"])[:100] if verdict.get("failure") else None,
        "parts": cut(json.dumps(parts, ensure_ascii=False), _TRUTH) if parts else "",
        "version": number(line.get("version")),
    }


def _telling(items: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the `count` most informative responses, in the order of the file.

    Chosen first are the best response, the worst, a response that was cut off, and a response without a verdict; then
    the others, in the order of the file.
    """
    everything = range(len(items))
    judged = sorted((k for k in everything if items[k]["score"] is not None), key=lambda k: items[k]["score"])
    wanted = [*judged[-1:], *judged[:1]]
    wanted += [k for k in everything if items[k]["finished"] is False][:1]
    wanted += [k for k in everything if items[k]["score"] is None][:1]
    return [items[k] for k in sorted(list(dict.fromkeys([*wanted, *everything]))[:count])]


def shaping(run: RunRecord, item: dict[str, Any]) -> dict[str, Any]:
    """Return the response with `shaped` (its reward in training) and `shaping` (why `shaped` differs from its score).

    With shaping by length `shaped` is None, because this shaping needs token counts, which are not stored.
    """
    named = (("overlong", "overlong_tokens"), ("cosine", "cosine"))
    by_length = [name for name, on in named if run.setting(f"trainer.grpo.shaping.{on}")]
    penalty = number(run.setting("trainer.grpo.unfinished_penalty"))
    factor = number(run.setting("trainer.grpo.unfinished_factor"))
    if item["score"] is None or penalty is None or factor is None:
        return {**item, "shaped": None, "shaping": "no verdict" if item["score"] is None else "settings unknown"}
    if by_length:
        return {**item, "shaped": None, "shaping": f"{' and '.join(by_length)}: by token length, which is not stored"}
    if (penalty or factor != 1.0) and item["finished"] is False:
        reason = "unfinished:" + (f" x {factor:g}" if factor != 1.0 else "") + (f" -{penalty:g}" if penalty else "")
        return {**item, "shaped": number(factor * item["score"] - penalty), "shaping": reason}
    return {**item, "shaped": item["score"], "shaping": "none"}


def cut(text: str, length: int) -> str:
    """Shorten a long text by removing its middle, and state how much is missing."""
    if len(text) <= length:
        return text
    half = length // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"

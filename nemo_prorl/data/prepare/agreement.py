"""The agreement of a problem's two solutions: by a judge, which also reads the short answers, or by the grader."""

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_prorl.data.prepare import answers, gold
from nemo_prorl.data.prepare.drafts import Draft, Drop
from nemo_prorl.data.prepare.judge import (
    Cache,
    Judgement,
    JudgeOptions,
    JudgeVerdict,
    key_of,
    read_cache,
    request_judgements,
    request_of,
)
from nemo_prorl.data.prepare.manifest import AgreementCheck
from nemo_prorl.data.records import PromptRecord

_log = logging.getLogger(__name__)

_LEAST_BATCH = 64  # pairs per round, so that the judge's workers are busy in the last rounds too
_CHARS_PER_TOKEN = 4  # of English text, for the estimate
_REPLY_TOKENS = 200  # of a reply without thought, for the estimate

_REASONS: dict[JudgeVerdict, str] = {
    "disagree": "the solutions disagree",
    "unclear": "no verdict of the judge",
    "no answer": "no short answer",
}


@dataclass(frozen=True)
class Outcome:
    """The result for each draft, in order: the draft with its truth, or the reason to drop it."""

    results: list[Draft | Drop]
    check: AgreementCheck


def order_of(count: int, size: int | None, seed: int) -> list[int]:
    """Return the order in which pairs are judged: that of the source, or a random one if only `size` are kept."""
    if size is None or size >= count:
        return list(range(count))
    return random.Random(f"{seed}/size").sample(range(count), count)


def estimate(drafts: Sequence[Draft], options: JudgeOptions, cache: Path, size: int | None) -> str:
    """Return how many requests and tokens the judge will take: at most, and at least if `size` is given."""
    requests = [request_of(draft, options) for draft in drafts]
    judged_before = read_cache(cache)
    missing = [request for request in requests if key_of(request) not in judged_before]
    count, chars = len(missing), sum(len(request["messages"][0]["content"]) for request in missing)
    each = math.ceil(chars / _CHARS_PER_TOKEN / count) if count else 0
    before = len(requests) - count
    least = count if size is None else max(0, min(count, size - before))
    stop = "" if size is None else f" and at least {least}, because it ends when --size {size} are kept"
    return (
        f"{len(requests)} pairs of solutions, {before} of them judged before: at most {count} requests{stop}.  About"
        f" {each} prompt tokens per request, at {_CHARS_PER_TOKEN} characters per token, and {_REPLY_TOKENS} per reply"
        f" without thought, at most {options.max_tokens}: {each * count / 1e6:.2f} and"
        f" {_REPLY_TOKENS * count / 1e6:.2f} million tokens for all"
    )


def judged(
    drafts: Sequence[Draft],
    options: JudgeOptions,
    cache: Path,
    fault_of: Callable[[dict[str, Any]], str | None],
    size: int | None,
    seed: int,
) -> Outcome:
    """Ask the judge for the short answers of both solutions and for their agreement.

    With `size`, pairs are judged in a random order fixed by `seed`, in rounds of as many as are still missing, until
    `size` are kept.  The kept pairs are the first that agree in this order, whatever the rounds and the judge's speed.

    Args:
        fault_of: returns why the plugin refuses a truth; None for a valid one.
    """
    _log.info("%s", estimate(drafts, options, cache, size))
    requests = [request_of(draft, options) for draft in drafts]
    keys = [key_of(request) for request in requests]
    order = order_of(len(drafts), size, seed)
    wanted = len(drafts) if size is None else min(size, len(drafts))
    results: list[Draft | Drop] = [Drop("not judged", "--size was reached before")] * len(drafts)
    counts: Counter[JudgeVerdict] = Counter()
    used: dict[str, Judgement] = {}
    kept = at = 0
    with Cache(cache) as known:
        while kept < wanted and at < len(order):
            batch = order[at : at + max(_LEAST_BATCH, wanted - kept)]
            missing = {keys[index]: requests[index] for index in batch if keys[index] not in known.judgements}
            _log.info(
                "%d of %d records are kept; judging the next %d of %d pairs, %d of them from %s",
                *(kept, wanted, len(batch), len(order), len(batch) - len(missing), cache),
            )
            request_judgements(missing, options, known)
            for index in batch:
                judgement = used[keys[index]] = known.judgements[keys[index]]
                result = _result(drafts[index], judgement, fault_of)
                counts[judgement.verdict] += 1
                if isinstance(result, Draft):
                    kept += 1
                    result = result if kept <= wanted else Drop("beyond --size")
                results[index] = result
            at += len(batch)
    check: AgreementCheck = {"by": "judge", "model": options.model, "counts": dict(counts), "requests": len(used)}
    check["prompt_tokens"] = sum(judgement.prompt_tokens for judgement in used.values())
    check["completion_tokens"] = sum(judgement.completion_tokens for judgement in used.values())
    _log.info(
        "the judge answered %d requests: %d prompt and %d completion tokens, by its replies",
        *(check["requests"], check["prompt_tokens"], check["completion_tokens"]),
    )
    return Outcome(results, check)


def _result(draft: Draft, judgement: Judgement, fault_of: Callable[[dict[str, Any]], str | None]) -> Draft | Drop:
    """Return the draft with the answers that the judge read, or the reason to drop it."""
    if judgement.verdict != "agree":
        return Drop(_REASONS[judgement.verdict], f"{judgement.first[:80]!r} and {judgement.second[:80]!r}")
    own = answers.last_box(draft.candidate) or judgement.second
    accepted = list(dict.fromkeys([judgement.first, own]))
    if fault := next((drop for text in accepted if (drop := answers.unusable(text))), None):
        return fault
    truth = {"answer": accepted if len(accepted) > 1 else own}
    if (refused := fault_of(truth)) is not None:
        return Drop("refused by the plugin", refused)
    return replace(draft, truth=truth, gold=f"\\boxed{{{own}}}")


def graded(drafts: Sequence[Draft], records: Sequence[PromptRecord], workers: int, unsafe_no_sandbox: bool) -> Outcome:
    """Keep a draft only if the plugin finds R1's boxed answer equal to the boxed answer of the source."""
    boxes = [answers.last_box(draft.reference) for draft in drafts]
    boxed = [at for at, box in enumerate(boxes) if box]
    truths: list[PromptRecord] = [{**records[at], "truth": {"answer": boxes[at]}} for at in boxed]
    wrong = gold.failures(truths, [str(drafts[at].gold) for at in boxed], workers, unsafe_no_sandbox)
    disagree = {boxed[at]: reason for at, reason in wrong.items()}

    def result(at: int) -> Draft | Drop:
        if not boxes[at]:
            return Drop("nothing to compare", "the source's solution boxes no answer; a judge could read it")
        return Drop(_REASONS["disagree"], disagree[at]) if at in disagree else drafts[at]

    counts: dict[JudgeVerdict, int] = {
        "agree": len(boxed) - len(disagree),
        "disagree": len(disagree),
        "unclear": len(boxes) - len(boxed),
    }
    return Outcome([result(at) for at in range(len(drafts))], {"by": "grader", "counts": counts})

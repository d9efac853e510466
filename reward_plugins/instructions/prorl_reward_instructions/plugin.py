"""The plugin class for `instructions`: checks a response in IFEval's strict and loose modes."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_prorl.rewards.interface import Canary, Example, RewardPlugin, RewardRequest, RewardResult, no_answer
from prorl_reward_instructions import arguments, ifeval, training, words

KNOWN = {**ifeval.INSTRUCTIONS, **training.INSTRUCTIONS}


def _listed(truth: dict[str, Any], name: str) -> list[Any]:
    value = truth.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"truth.{name} is {value!r}; it must be a non-empty list")
    return value


def checks_of(truth: dict[str, Any]) -> list[tuple[str, partial[bool]]]:
    """Return name and check (a function of the text) of each instruction.  Raises ValueError that names the field."""
    names = _listed(truth, "instruction_id_list")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in KNOWN:
            known = ", ".join(sorted(KNOWN))
            raise ValueError(f"truth.instruction_id_list[{index}] is {name!r}; known: {known}")
    kwargs = _listed(truth, "kwargs")
    if len(kwargs) != len(names):
        raise ValueError(f"truth.kwargs has {len(kwargs)} entries; it must have {len(names)}, one per instruction")
    checks = []
    for index, (name, values) in enumerate(zip(names, kwargs, strict=True)):
        if values is not None and not isinstance(values, dict):
            raise ValueError(f"truth.kwargs[{index}] is {values!r}; it must be an object or null")
        keywords = arguments.read(f"truth.kwargs[{index}]", KNOWN[name], values or {})
        checks.append((name, partial(KNOWN[name].check, **keywords)))
    return checks


def loose_variants(text: str) -> list[str]:
    """Return the variants of a text for IFEval's loose mode, without blank and repeated ones.

    The variants omit no line, the first line, the last line or both, each with and without asterisks.
    """
    lines = text.split("\n")
    kept = [text] + ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    variants = dict.fromkeys(variant for whole in kept for variant in (whole, whole.replace("*", "")))
    return [variant for variant in variants if variant.strip()]


class InstructionsReward(RewardPlugin):
    """Continuous reward: the fraction of instructions followed, in IFEval's strict mode (paper sec. 2)."""

    name = "instructions"
    tasks = ("instructions",)

    @dataclass(frozen=True)
    class Config:
        """Settings.  `time_budget_s`: CPU seconds per answer."""

        time_budget_s: float = 10.0

    def prepare(self) -> None:
        words.prepare()

    def validate_truth(self, truth: dict[str, Any]) -> None:
        checks_of(truth)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        few = {"num_words": 5, "relation": "less than"}
        sections = {"section_spliter": "Section", "num_sections": 2}
        return (
            Example(
                {
                    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
                    "kwargs": [{}, few],
                },
                "Snow falls all night.",
                "Snow, rain and wind, all night.",
            ),
            Example(
                {"instruction_id_list": ["detectable_format:multiple_sections"], "kwargs": [sections]},
                "Section 1\nThe sea.\nSection 2\nThe shore.",
                "First the sea, then the shore.",
            ),
        )

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        def truth(name: str, **kwargs: Any) -> dict[str, Any]:
            return {"instruction_id_list": [name], "kwargs": [kwargs]}

        exactly = truth("length_constraints:number_words", num_words=4, relation="at least")
        bullets = truth("detectable_format:number_bullet_lists", num_bullets=2)
        keyword = truth("keywords:existence", keywords=["snow"])
        end = truth("startend:end_checker", end_phrase="That is all.")
        json_only = truth("detectable_format:json_format")
        return (
            Canary(exactly, "One two, three four", True),
            Canary(exactly, "One two three", False),
            Canary(bullets, "- one\n* two", True),
            Canary(bullets, "- one\n- two\n- three", False),
            Canary(keyword, "<think>rain</think>SNOW falls.", True),
            Canary(keyword, "<think>snow</think>Rain falls.", False),
            Canary(end, 'So "that is all."', True),
            Canary(end, "That is all. Or is it?", False),
            Canary(json_only, '```json\n{"a": [1]}\n```', True),
            Canary(json_only, '{"a": [1}', False),
        )

    def score(self, request: RewardRequest) -> RewardResult:
        checks = checks_of(request.truth)
        text = request.answer_text
        if text is None:
            return no_answer()
        if "</think>" in request.response:
            text = text.lstrip()  # white space after </think> is not part of the answer
        strict = [bool(text.strip()) and check(text) for _, check in checks]
        variants = loose_variants(text)
        loose = [
            followed or any(check(variant) for variant in variants)
            for followed, (_, check) in zip(strict, checks, strict=True)
        ]
        missed = ", ".join(name for followed, (name, _) in zip(strict, checks, strict=True) if not followed)
        return RewardResult(
            score=sum(strict) / len(strict),
            correct=all(strict),
            parts={
                "strict": sum(strict) / len(strict),
                "loose": sum(loose) / len(loose),
                "prompt_strict": float(all(strict)),
                "prompt_loose": float(all(loose)),
            },
            detail=f"followed {sum(strict)} of {len(strict)}" + (f"; not followed: {missed}" if missed else ""),
        )

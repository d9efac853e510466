"""The plugin class for `puzzles`: scores answers with the `score_answer` of reasoning-gym's data sets."""

import ast
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nemo_prorl.rewards.interface import (
    FULL_SCORE,
    Canary,
    Example,
    InvalidAnswer,
    RewardPlugin,
    RewardRequest,
    RewardResult,
    no_answer,
)

MAX_ANSWER_CHARS = 100_000

# Scorers that compare with tuples: metadata keys whose nested lists were tuples before JSON.
_TUPLES = {"arc_agi": ("input", "output"), "rearc": ("input", "output")}
# Data sets whose entries have the answer in the metadata (entries of boxnet and rush_hour have no answer).
_ANSWER_IN_METADATA: dict[str, tuple[str, Callable[[Any], str]]] = {
    "graph_color": ("possible_answer", json.dumps),
    "propositional_logic": ("example_answer", str),
    "rubiks_cube": ("example_correct_answer", str),
}

# Data sets whose scorers run the answer as Python, so that an answer could run any code with this worker's rights.
# In the first, `eval` is replaced by `ast.literal_eval`: lists and strings as before, nothing else.
EVALUATED = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
# These read the answer with SymPy's `parse_expr`, which runs it: they get formulas only.  A formula does not contain
# `Integral`, with which each integral would be its own solution.
PARSED = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
_NAMES = (
    "sin cos tan cot sec csc asin acos atan acot asec acsc sinh cosh tanh coth sech csch asinh acosh atanh acoth asech"
    " acsch exp log ln sqrt cbrt root Abs sign pi oo Rational Integer Float"
)
_NUMBER = r"(?:\d++(?:\.\d*+)?|\.\d++)(?:[eE][+-]?\d++)?"
_NAME = rf"(?:[A-Za-z]\d*+|{'|'.join(_NAMES.split())})"
# Possessive (`*+`): a text that fails costs no more time than one that fits.
_FORMULA = re.compile(rf"(?>(?:{_NUMBER}|{_NAME})(?![\w.])|[\s+*/^(),%-])*+", re.ASCII)

Scorer = Callable[[str, dict[str, Any]], float]


def last_answer(text: str) -> str | None:
    """Return the text in the last <answer>...</answer>; None without these tags."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : end].strip()


def _asks_for_tags(prompt: str | list[dict[str, Any]]) -> bool:
    """Return whether a prompt mentions `<answer>`; otherwise the whole response is the answer."""
    return "<answer>" in (prompt if isinstance(prompt, str) else json.dumps(prompt))


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value


def restored(dataset: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry with the tuples that its scorer expects, which JSON made lists.  Does not change `entry`."""
    metadata = entry.get("metadata")
    keys = _TUPLES.get(dataset, ())
    if not keys or not isinstance(metadata, dict):
        return entry
    fixed = {key: _tupled(metadata[key]) for key in keys if key in metadata}
    return {**entry, "metadata": {**metadata, **fixed}}


def own_answer(dataset: str, entry: dict[str, Any]) -> str | None:
    """Return the right answer stored in an entry, as text; None if the entry has no answer."""
    if entry.get("answer") is not None:
        return str(entry["answer"])
    key, text = _ANSWER_IN_METADATA.get(dataset, ("", str))
    value = entry["metadata"].get(key)
    return None if value is None else text(value)


def is_formula(text: str) -> bool:
    """Return whether a text has only numbers, operators, names of one letter and known functions: safe to evaluate."""
    return _FORMULA.fullmatch(text) is not None


@functools.lru_cache(maxsize=256)
def _scorer(dataset: str, options: str) -> Scorer:
    """Return the scorer of a data set with `options` (JSON).  Cached, because some data sets load word lists."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if dataset not in DATASETS:
        raise ValueError(f"truth.dataset is {dataset!r}; reasoning-gym knows {', '.join(sorted(DATASETS))}")
    if dataset in EVALUATED:
        vars(sys.modules[DATASETS[dataset][0].__module__])["eval"] = ast.literal_eval
    try:
        score: Scorer = create_dataset(dataset, **json.loads(options)).score_answer
    except Exception as error:
        raise ValueError(f"truth.config does not fit reasoning-gym's data set {dataset!r}: {error}") from error
    return score


class PuzzlesReward(RewardPlugin):
    """Continuous reward: the score that a reasoning-gym data set gives to an answer (paper sec. 2)."""

    name = "puzzles"
    tasks = ("puzzles",)

    @dataclass(frozen=True)
    class Config:
        """Settings.  `time_budget_s`: CPU seconds per answer.

        Right answers take at most 0.03 s, and 0.35 s where the scorer first loads its tables; SymPy may take half a
        minute to find that a wrong integral is wrong (benchmarks/results/puzzle_times-2026-11-26.txt).
        """

        time_budget_s: float = 5.0

    def prepare(self) -> None:
        _scorer("chain_sum", "{}")

    def validate_truth(self, truth: dict[str, Any]) -> None:
        if not isinstance(truth.get("dataset"), str):
            raise ValueError(
                f"truth.dataset is {truth.get('dataset')!r}; it must be the name of a reasoning-gym data set"
            )
        entry = truth.get("entry")
        if not isinstance(entry, dict) or not entry.keys() >= {"question", "answer", "metadata"}:
            raise ValueError("truth.entry must be reasoning-gym's entry: an object with question, answer and metadata")
        if not isinstance(entry["metadata"], dict):
            raise ValueError("truth.entry.metadata must be an object")
        if not isinstance(truth.get("config", {}), dict):
            raise ValueError("truth.config must be an object: the data set's options")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        addition = {"question": "2 + 3 =", "answer": "5", "metadata": {"num_terms": 2}}
        puzzle = {"vertices": [0, 1, 2], "edges": [[0, 1], [1, 2]], "num_colors": 2, "color_options": [1, 2]}
        coloring = {"question": "Colour 0-1-2.", "answer": None, "metadata": {"puzzle": puzzle}}
        return (
            Example({"dataset": "chain_sum", "entry": addition}, "<answer>5</answer>", "<answer>6</answer>"),
            Example(
                {"dataset": "graph_color", "entry": coloring},
                'The ends are alike: <answer>{"0": 1, "1": 2, "2": 1}</answer>',
                'All are alike: <answer>{"0": 1, "1": 1, "2": 1}</answer>',
            ),
        )

    @classmethod
    def canaries(cls) -> tuple[Canary, ...]:
        sums, coloring = (example.truth for example in cls.examples())
        spelled = {"question": "Reverse: abc def", "answer": "def abc", "metadata": {}}
        words = {"dataset": "word_sequence_reversal", "entry": spelled}
        return (
            Canary(sums, "<answer>6</answer> No: <answer> 5 </answer>", True),
            Canary(sums, "<answer>5 or 6</answer>", False),
            Canary(sums, "<think>Is it 6?</think>5", True),
            Canary(sums, "<answer>-5</answer>", False),
            Canary(coloring, '<answer>{"2": 2, "1": 1, "0": 2}</answer>', True),
            Canary(coloring, '<answer>{"0": 1, "1": 3, "2": 1}</answer>', False),
            Canary(coloring, "<answer>{}</answer>", False),
            Canary(words, "<answer>def abc</answer>", True),
            Canary(words, "<answer>abc def</answer>", False),
        )

    def score(self, request: RewardRequest) -> RewardResult:
        self.validate_truth(request.truth)
        text = request.answer_text
        if text is None:
            return no_answer()
        answer = last_answer(text)
        if answer is None and not _asks_for_tags(request.prompt):
            answer = text.strip()
        if answer is None:
            return RewardResult(score=0.0, correct=False, detail="no answer in <answer></answer>")
        if len(answer) > MAX_ANSWER_CHARS:
            raise InvalidAnswer(f"the answer has {len(answer)} characters; at most {MAX_ANSWER_CHARS} are judged")
        return self._judge(request.truth, answer)

    def _judge(self, truth: dict[str, Any], answer: str) -> RewardResult:
        dataset, config = truth["dataset"], dict(truth.get("config", {}))
        entry = restored(dataset, truth["entry"])
        if dataset == "composite":  # the metadata of an entry names its data set
            dataset = entry["metadata"]["source_dataset"]
            entry = restored(dataset, entry)
        score_answer = _scorer(dataset, json.dumps(config, sort_keys=True))
        oracle = entry["answer"]
        if isinstance(oracle, str) and oracle != answer and oracle.strip() == answer:
            answer = oracle  # reading the tags removed the white space around the answer
        if dataset in PARSED and not is_formula(answer):
            answer = ""  # the scorer's lowest score, as for any text that is not an expression
        try:
            raw = float(score_answer(answer, entry))
        except Exception as error:
            self._raise_if_bad_entry(dataset, entry, score_answer, error)
            raise InvalidAnswer(
                f"the scorer of {dataset!r} refused the answer: {type(error).__name__}: {error}"
            ) from error
        score = min(1.0, max(0.0, raw))
        parts = {} if score == raw else {"raw": raw}
        return RewardResult(score=score, correct=score >= FULL_SCORE, parts=parts, detail=f"{dataset}: {raw:g}")

    def _raise_if_bad_entry(self, dataset: str, entry: dict[str, Any], score_answer: Scorer, error: Exception) -> None:
        """Raise ValueError if the scorer also fails on the entry's own answer: then the entry is bad."""
        own = own_answer(dataset, entry)
        try:
            score_answer("" if own is None else own, entry)
        except Exception:
            raise ValueError(f"the entry of {dataset!r} cannot be scored: {type(error).__name__}: {error}") from error

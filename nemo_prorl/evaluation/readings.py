"""What a comparison of two models shows, in a word and as a clause; and the form of an answer by task."""

from typing import Literal

Reading = Literal["new solutions", "sharpened", "narrowed", "worse", "closer", "no difference"]

# Text that a response contains if it answers in the form that the task asks for; other tasks have no such form.
FORMS = {"math": "\\boxed{", "stem": "\\boxed{", "puzzles": "<answer>", "code": "```"}


def explained(reading: Reading, base: str, k: int) -> str:
    """Return what a reading says about a model, such as `is right less often than BASE: worse`.

    `base`: name of the base model.  `k`: largest measured k.
    """
    tries = f"{k} {'try' if k == 1 else 'tries'}"
    return {
        "new solutions": f"solves more prompts in {tries} than {base}: new solutions",
        "sharpened": f"is right more often than {base} at the first try; in {tries}, no difference is seen: sharpened",
        "narrowed": f"is right more often at the first try, but {base} solves more prompts in {tries}: narrowed",
        "worse": f"is right less often than {base}: worse",
        "closer": f"has a higher mean reward than {base}, but is not right more often: closer",
        "no difference": f"is not measurably different from {base}",
    }[reading]


def domain_name(domain: str) -> str:
    """Return the name of a domain in a table; benchmarks of one's own have the domain `other` unless they name one."""
    return "other benchmarks" if domain == "other" else domain

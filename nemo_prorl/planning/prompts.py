"""Shows for `prorl plan` what system prompt and chat template add to a prompt.  Does not import transformers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nemo_prorl.config import DataConfig
from nemo_prorl.data.model_folder import (
    TemplateRefused,
    chat_template,
    no_template,
    refused_messages,
    rendered,
    syntax_fault,
    tokenizer_fault,
)
from nemo_prorl.data.render import written

PROMPT = "PROMPT"  # stands for a record's prompt in the shown form


def prompt_form(data: DataConfig, model: str | None) -> str:
    """Return a rendered prompt, quoted, in which the word PROMPT stands for the text of the record.

    Args:
        model: Hugging Face folder with the chat template; None: the run makes its model when it starts.
    """
    text, messages = PROMPT, [{"role": "user", "content": PROMPT}]
    shown = written(text, data.prompt, data.system)
    if isinstance(shown, str) and data.prompt != "as_written":
        return repr(shown)
    listed = _through_template(written(messages, data.prompt, data.system), model)
    return listed if not isinstance(shown, str) else f"text {shown!r}; messages {listed}"


def template_fault(data: DataConfig, folder: Path) -> str | None:
    """Return what is wrong with a model folder's chat template, and the fix, if all prompts of a run go through it."""
    if data.prompt != "chat":
        return None
    if (template := chat_template(folder)) is None:
        return f"{folder}: {no_template('data.prompt=chat')}"
    if fault := syntax_fault(folder):
        return fault
    try:
        rendered(template, written(PROMPT, data.prompt, data.system))
    except TemplateRefused as error:
        return f"{folder}: {refused_messages(error, data.system)}"
    except Exception:  # as in `_through_template`
        return None
    return None


def longest_prompt(data: DataConfig, folder: Path, records: Iterable[Mapping[str, Any]]) -> int | None:
    """Return about how many tokens the longest of some prompts has; None if only transformers can count them.

    The tokenizer's own file is read, which takes a tenth of the time of an import of transformers.
    """
    try:
        from tokenizers import Tokenizer

        tokenizer, template = Tokenizer.from_file(str(folder / "tokenizer.json")), chat_template(folder)
        prompts = (written(record["prompt"], data.prompt, data.system) for record in records)
        texts = [prompt if isinstance(prompt, str) else rendered(str(template), prompt) for prompt in prompts]
        return max(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    except Exception:  # of tokenizers, or of a template
        return None


def _through_template(messages: Any, model: str | None) -> str:
    if model is not None and tokenizer_fault(Path(model)):
        return "refused: the model folder has no tokenizer"
    if model is not None and (fault := syntax_fault(Path(model))):
        return f"refused: {fault}"
    template = None if model is None else chat_template(Path(model))
    if template is None:
        return "by the tokenizer's chat template" if model is None else "refused: the tokenizer has no chat template"
    try:
        return repr(rendered(template, messages))
    except Exception as error:  # a template may raise anything; the run's own check has the last word
        return f"by the tokenizer's chat template (not shown: {type(error).__name__}: {error})"

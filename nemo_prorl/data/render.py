"""Converts prompts to token ids and responses to text, with the policy's tokenizer and chat template."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_prorl.config import DataConfig
from nemo_prorl.data.model_folder import no_eos, no_template, refused_messages, syntax_fault, tokenizer_fault
from nemo_prorl.errors import ConfigError, DataError
from nemo_prorl.files import first_line
from nemo_prorl.rewards.interface import opened_thought

_log = logging.getLogger(__name__)

_TAIL = 16  # last tokens of a prompt that can contain `<think>` and white space; the tag is at most 7 tokens
_BATCH = 1000  # prompts that are tokenized at once; more take more memory and are not faster
_CORES = "TOKENIZERS_PARALLELISM"


# The dialogue of DeepSeek-R1-Zero for models without a chat template (arXiv 2501.12948, table 1), in our words.
_R1 = """A user asks a question and an assistant answers it. The assistant first reasons between <think> and </think>, \
and then gives the answer.
User: {prompt}
Assistant: <think>
"""


def written(prompt: str | list[dict[str, str]], form: str, system: str | None) -> str | list[dict[str, str]]:
    """Return a record's prompt with the system prompt, as text or as messages for the chat template.

    In text, messages are separated by an empty line, and the system prompt comes first.

    Args:
        form: value of `data.prompt`, which decides between text and messages.
        system: the system prompt, if any.
    """
    if form == "chat" and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if form in ("text", "r1") and not isinstance(prompt, str):
        prompt = "\n\n".join(message["content"] for message in prompt)
    if isinstance(prompt, str):
        text = prompt if system is None else f"{system}\n\n{prompt}"
        return _R1.replace("{prompt}", text) if form == "r1" else text
    return prompt if system is None else [{"role": "system", "content": system}, *prompt]


class PromptRenderer:
    """A converter between text and token ids, for a context of `context_tokens` (prompt and response together).

    `data` gives the form of the prompts (`prompt`) and the system prompt (`system`).  Raises ConfigError if the folder
    does not contain a tokenizer with an eos token.
    """

    def __init__(self, tokenizer_folder: Path | str, context_tokens: int, data: DataConfig | None = None) -> None:
        os.environ.setdefault(_CORES, "false")  # ranks and workers fork after this
        from transformers import AutoTokenizer

        folder = Path(tokenizer_folder)
        if fault := tokenizer_fault(folder):
            raise ConfigError(fault)
        data = data or DataConfig()
        self.context_tokens, self._form, self._system = context_tokens, data.prompt, data.system
        self._folder = folder
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of any kind, such as a bare one for a form that is too new
            cause = f"{type(error).__name__}: {first_line(error)}"
            fix = "Fix: copy the model's tokenizer files again, in a form for transformers 4"
            raise ConfigError(f"{folder}: transformers cannot load the tokenizer: {cause}. {fix}") from error
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(no_eos(folder))
        special = {at for at, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        tags = set(self._tokenizer.convert_tokens_to_ids(["<think>", "</think>"])) - {self._tokenizer.unk_token_id}
        self._hidden = special - tags  # some tokenizers mark the tags as special; verifiers need them

    @property
    def eos_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    def prompt_ids(self, record: Mapping[str, Any]) -> list[int]:
        """Return the token ids of a record's prompt; a message list goes through the chat template.

        Raises DataError, naming the record, for a prompt that is empty or leaves no room for a response; ConfigError
        for one that needs a chat template that the tokenizer lacks.
        """
        ids = self._rendered(record)
        if len(ids) >= self.context_tokens:
            raise DataError(
                f"record '{record['id']}': its prompt has {len(ids)} tokens, and the context of "
                f"{self.context_tokens} (trainer.grpo.context_tokens) leaves no room for a response"
            )
        return ids

    def length(self, record: Mapping[str, Any]) -> int:
        """Return the number of tokens of a record's prompt.  Raises DataError like `prompt_ids`, but not for length."""
        return len(self._rendered(record))

    def lengths(self, records: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the number of tokens of each record's prompt, like `length`, in batches and on all cores."""
        lengths: list[int] = []
        for start in range(0, len(records), _BATCH):
            some = records[start : start + _BATCH]
            texts = [self._text(record) for record in some]
            with _all_cores():
                ids = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
            counts = [len(prompt) for prompt in ids["input_ids"]]
            if 0 in counts:
                raise _empty(some[counts.index(0)])
            lengths += counts
        return lengths

    def _rendered(self, record: Mapping[str, Any]) -> list[int]:
        if not (ids := self.encode(self._text(record))):
            raise _empty(record)
        return ids

    def _text(self, record: Mapping[str, Any]) -> str:
        """Return the prompt's text; a message list goes through the chat template."""
        from jinja2 import TemplateError, TemplateSyntaxError

        prompt = written(record["prompt"], self._form, self._system)
        if isinstance(prompt, str):
            return prompt
        if self._tokenizer.chat_template is None:
            need = "data.prompt=chat" if self._form == "chat" else "its message list"
            raise ConfigError(f"record '{record['id']}': {self._folder}: {no_template(need)}")
        try:
            return str(self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False))
        except TemplateSyntaxError as error:
            raise ConfigError(syntax_fault(self._folder) or f"{self._folder}: its chat template: {error}") from error
        except TemplateError as error:  # a template refuses messages, such as two of the same role in a row
            raise DataError(f"record '{record['id']}': {refused_messages(error, self._system)}") from error

    def opened_thought(self, prompt_ids: Sequence[int]) -> str:
        """Return the `<think>` at the end of a rendered prompt, or an empty string."""
        return opened_thought(self._tokenizer.decode(list(prompt_ids[-_TAIL:])))

    def judged_text(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> str:
        """Return the response as verifiers get it: with `<think>` before it if the prompt ends in `<think>`."""
        return self.opened_thought(prompt_ids) + self.decode(response_ids)

    def target_ids(self, prompt_ids: Sequence[int], answer: str) -> list[int]:
        """Return the token ids of a target response: `answer` and eos.

        If the prompt ends in `<think>`, the ids begin with `</think>`, so that the thought is empty.
        """
        closing = "</think>" if self.opened_thought(prompt_ids) else ""
        return [*self.encode(closing + answer), self.eos_id]

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, without bos or eos."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens such as bos, eos and pad but with the `<think>` tags."""
        shown = [token for token in ids if token not in self._hidden]
        return str(self._tokenizer.decode(shown, clean_up_tokenization_spaces=False))


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer use all cores inside of the block.  Outside of it no threads run, because processes fork."""
    before = os.environ.get(_CORES, "false")
    os.environ[_CORES] = "true"
    try:
        yield
    finally:
        os.environ[_CORES] = before


def _empty(record: Mapping[str, Any]) -> DataError:
    return DataError(f"record '{record['id']}': its prompt is empty")

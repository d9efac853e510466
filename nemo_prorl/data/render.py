"""From a record's prompt to token ids and back, with the policy's own tokenizer and chat template."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_prorl.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class PromptRenderer:
    """Renders prompts for a context of `context_tokens` (prompt and response together).

    Raises ConfigError when the folder holds no tokenizer.
    """

    def __init__(self, tokenizer_folder: Path | str, context_tokens: int, max_response: int | None = None) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers fork after this
        from transformers import AutoTokenizer

        folder = Path(tokenizer_folder)
        if not (folder / "tokenizer_config.json").is_file():
            raise ConfigError(f"{folder} holds no tokenizer (tokenizer_config.json): name a Hugging Face model folder")
        self.context_tokens = context_tokens
        self.max_response = max_response
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.eos_token_id is None:
            raise ConfigError(f"{folder}: its tokenizer has no eos token; set eos_token in tokenizer_config.json")

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @property
    def eos_id(self) -> int:
        return int(self._tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """The pad token, or eos where a tokenizer has none: masks decide, never this id."""
        pad = self._tokenizer.pad_token_id
        return self.eos_id if pad is None else int(pad)

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Token ids of a record's prompt: a string as it is, a message list through the chat template.

        Raises DataError, naming the record, for a prompt that leaves no room for a response, is empty, or needs
        a chat template that the tokenizer lacks.
        """
        ids = self._rendered(record)
        if len(ids) >= self.context_tokens:
            raise DataError(
                f"record '{record['id']}': its prompt has {len(ids)} tokens, and the context of "
                f"{self.context_tokens} (trainer.grpo.context_tokens) leaves no room for a response"
            )
        return ids

    def length(self, record: dict[str, Any]) -> int:
        """Tokens of a record's prompt, whatever the context.  Raises DataError as `prompt_ids` does for the others."""
        return len(self._rendered(record))

    def _rendered(self, record: dict[str, Any]) -> list[int]:
        prompt = record["prompt"]
        if isinstance(prompt, str):
            ids = self.encode(prompt)
        elif self._tokenizer.chat_template is None:
            raise DataError(
                f"record '{record['id']}': its prompt is a message list and the tokenizer has no chat template; "
                "write the prompt as one string"
            )
        else:
            ids = list(self._tokenizer.apply_chat_template(prompt, add_generation_prompt=True))
        if not ids:
            raise DataError(f"record '{record['id']}': its prompt is empty")
        return ids

    def response_room(self, prompt_ids: Sequence[int]) -> int:
        """The most tokens that a response to this prompt may have, at least 1."""
        room = self.context_tokens - len(prompt_ids)
        return room if self.max_response is None else min(room, self.max_response)

    def target_ids(self, response: str) -> list[int]:
        """Token ids of a response that ends by itself: its text and eos."""
        return [*self.encode(response), self.eos_id]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids without bos, eos and pad; `<think>` and the like stay."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

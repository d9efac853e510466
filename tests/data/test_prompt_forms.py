"""The form of prompts: templates of generated problems, chat template, text, R1-Zero's dialogue, system prompt."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_prorl import settings
from nemo_prorl.config import DataConfig, DataSource
from nemo_prorl.data.blend import load_sources
from nemo_prorl.data.laptop.generators import LAPTOP_TEMPLATES
from nemo_prorl.data.laptop.model import build_tokenizer
from nemo_prorl.data.prepare.answers import BOXED
from nemo_prorl.data.render import PromptRenderer, written
from nemo_prorl.errors import ConfigError
from nemo_prorl.planning.prompts import prompt_form

USER = [{"role": "user", "content": "Hi."}]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("prompt", "form", "system", "expected"),
    [
        ("Hi.", "as_written", None, "Hi."),
        (USER, "as_written", None, USER),
        ("Hi.", "as_written", "Be brief.", "Be brief.\n\nHi."),
        ("Hi.", "chat", None, USER),
        (USER, "chat", "Be brief.", [SYSTEM, *USER]),
        ([*USER, {"role": "assistant", "content": "Yes?"}], "text", None, "Hi.\n\nYes?"),
        (USER, "text", "Be brief.", "Be brief.\n\nHi."),
    ],
)
def test_a_prompt_is_written_in_each_form(prompt: Any, form: str, system: str | None, expected: Any) -> None:
    assert written(prompt, form, system) == expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_tokenizer(["User: What is 1 + 1?\nAssistant: <think></think> a question and answer, Hi."]).save_pretrained(
        tmp_path
    )
    return tmp_path


def test_r1_ends_in_an_open_thought_that_verifiers_see(folder: Path) -> None:
    renderer = PromptRenderer(folder, 4096, DataConfig(prompt="r1"))
    ids = renderer.prompt_ids({"id": "a", "prompt": "What is 1 + 1?"})
    text = renderer.decode(ids)
    assert "User: What is 1 + 1?\nAssistant: <think>" in text
    assert renderer.judged_text(ids, renderer.encode("2</think>two")).startswith("<think>")


def test_a_response_is_judged_letter_by_letter_as_it_was_written(folder: Path) -> None:
    renderer = PromptRenderer(folder, 4096)
    text = "Hi . What is 1 , 1 ? do n't ! <think> and </think> 's "
    assert renderer.decode([*renderer.encode(text), renderer.eos_id]) == text
    prompt = renderer.encode("Hi. <think>\n")
    assert renderer.judged_text(prompt, renderer.encode(text)).endswith(text)


def test_a_chat_form_without_a_chat_template_names_the_fix(folder: Path) -> None:
    assert PromptRenderer(folder, 64, DataConfig(prompt="chat")).prompt_ids({"id": "a", "prompt": "Hi."})
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": None}))
    assert prompt_form(DataConfig(prompt="chat"), str(folder)).startswith("refused")
    with pytest.raises(ConfigError, match=r"record 'a'.*chat template.*data\.prompt=text"):
        PromptRenderer(folder, 64, DataConfig(prompt="chat")).prompt_ids({"id": "a", "prompt": "Hi."})


def test_math_is_asked_in_the_paper_s_words() -> None:
    words = "Let's think step by step and output the final answer within \\boxed{}."  # section 2.1
    assert words == BOXED
    assert DataConfig().templates["math"] == "{problem}\n\n" + words


def test_templates_are_those_of_real_models_unless_the_data_is_the_laptops() -> None:
    for data in ("laptop", "domains", "ablations"):
        assert dict(settings.load([f"data={data}"]).data.templates) == LAPTOP_TEMPLATES
    default = DataConfig().templates
    assert "templates" not in yaml.safe_load((settings.conf_folder() / "data" / "prorl.yaml").read_text())
    source = DataSource(name="a", generator="reasoning_gym:gcd", size=1)
    for templates in (LAPTOP_TEMPLATES, default, {**default, "puzzles": "Q: {problem} A:"}):
        [(_, [record])] = load_sources(DataConfig(train=[source], templates=templates)).train
        question = record["truth"]["entry"]["question"].strip()
        assert record["prompt"] == templates["puzzles"].replace("{problem}", question)
    from reasoning_gym.utils import SYSTEM_PROMPTS

    assert default["puzzles"] == SYSTEM_PROMPTS["default"].strip() + "\n\n{problem}"


def test_the_plan_shows_what_the_renderer_makes(folder: Path) -> None:
    for data in (DataConfig(prompt="chat"), DataConfig(prompt="chat", system="Be brief."), DataConfig(prompt="r1")):
        renderer = PromptRenderer(folder, 4096, data)
        shown = renderer.decode(renderer.prompt_ids({"id": "a", "prompt": "PROMPT"}))
        assert eval(prompt_form(data, str(folder))) == shown
    both = prompt_form(DataConfig(), str(folder))
    assert re.fullmatch(r"text 'PROMPT'; messages '.*PROMPT.*'", both)
    assert prompt_form(DataConfig(), None) == "text 'PROMPT'; messages by the tokenizer's chat template"


def test_a_template_without_the_problem_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.templates\.math=.*\{problem\} once"):
        settings.load(["data.templates.math=Compute."])


def test_a_tokenizer_without_an_eos_token_is_refused(folder: Path) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**found, "eos_token": None}))
    with pytest.raises(ConfigError, match="does not have an eos token"):
        PromptRenderer(folder, 64)

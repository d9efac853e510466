"""Python scripts of TRL: what they set after the constructor, and with options, is evaluated or must be set."""

from pathlib import Path

import pytest

from nemo_prorl import cli
from tests.migration.test_convert import GRPO, converted

ONE_CLASS = """
from trl import GRPOConfig, GRPOTrainer, TrlParser
@dataclass
class Own:
    model_name: str
    beta: float
    resume: bool = False
own = TrlParser(dataclass_types=[Own]).parse_args_and_config()[0]
model_path = own.model_name if not own.resume else "other"
model_name = AutoModelForCausalLM.from_pretrained(model_path)
trainer = GRPOTrainer(model_name, reward, GRPOConfig(beta=own.beta, max_steps=9))
"""


def test_a_class_of_the_script_has_the_values_of_its_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(ONE_CLASS)
    (tmp_path / "own.yaml").write_text("model_name: org/own\nbeta: 0.125\n")
    text = "accelerate launch --num_processes 8 train.py --config own.yaml"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    assert {f"{GRPO}.kl_coef=0.125", "pretrained_checkpoint.restore_from_path=org/own"} <= set(overrides)


AFTER = """
import dataclasses
from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(beta=0.3, max_steps=10, learning_rate=1e-6)
{change}
trainer = GRPOTrainer("org/model", length, args, data)
"""


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("args.beta = 0.1", "0.1"),
        ("args.beta: float = 0.1", "0.1"),
        ("args.beta += 0.1; args.beta *= 2", "0.8"),
        ("setattr(args, 'beta', 0.1)", "0.1"),
        ("args = dataclasses.replace(args, beta=0.1)", "0.1"),
        ("more = args\nmore.beta = 0.1", "0.1"),
        ("args.beta = 0.2\nargs.beta = 0.1", "0.1"),
        ("if __name__ == '__main__':\n    args.beta = 0.1", "0.1"),
        ("def tune(some):\n    some.beta = 0.1\ntune(args)", "0.1"),
        ("args.beta = 10**-1", "0.1"),
        ("FAST = True\nargs.beta = 0.1 if FAST else 0.2", "0.1"),
        ("args.beta = compute()", None),
        ("args.beta += compute()", None),
        ("if fast:\n    args.beta = 0.1", None),
        ("for args.beta in (0.1, 0.2):\n    pass", None),
        ("args = dataclasses.replace(args, beta=compute())", None),
        ("if fast:\n    args = GRPOConfig(beta=0.1, max_steps=10)", None),
    ],
)
def test_what_is_set_after_the_constructor_counts(
    change: str, expected: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = AFTER.format(change=change)
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code=0 if expected else 2)
    assert [one for one in overrides if "kl_coef" in one] == ([f"{GRPO}.kl_coef={expected}"] if expected else [])
    assert any(line.startswith(f"  {GRPO}.kl_coef: beta=") for line in comments) == (expected is None)


@pytest.mark.parametrize("change", ["args.beta = 0.1", "trainer.args.beta = 0.1", "trainer.beta = 0.1"])
def test_what_is_set_after_the_trainer_was_made_is_asked_for(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, comments = converted("trl", AFTER.format(change="") + change, tmp_path / "a.py", capsys, code=2)
    assert not any("kl_coef" in one for one in overrides)
    told = f"  {GRPO}.kl_coef: beta=0.3 or 0.1 (set after the trainer was made, which copied it) has no value here"
    assert told in comments
    text = "def made(args):\n    GRPOTrainer(model='org/model', args=args)\nargs = GRPOConfig(max_steps=9)"
    text += f"\n{change}\nmade(args)"
    if change.startswith("args"):
        assert f"{GRPO}.kl_coef=0.1" in converted("trl", text, tmp_path / "a.py", capsys)[0]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("for key, value in more.items():\n    setattr(args, key, value)", "setattr(args, key, value): which settings"),
        ("vars(args).update(more)", "vars(args).update(more): which settings"),
        ("args.set_optimizer(learning_rate=1)", "args.set_optimizer(learning_rate=1): which settings"),
        ("args = dataclasses.replace(args, **more)", "**more: "),
        ("class Mine(GRPOTrainer):\n    def compute_loss(self): pass", "class Mine: its methods (compute_loss)"),
        ("GRPOTrainer.compute_loss = mine", "GRPOTrainer.compute_loss: this attribute of the trainer may change"),
        ("setattr(GRPOTrainer, 'compute_loss', mine)", "setattr(GRPOTrainer, 'compute_loss', mine): this attribute of"),
        ("from own import OwnGRPOTrainer\nOwnGRPOTrainer('m', f, args)", "class OwnGRPOTrainer: another file has it"),
        ("from trl import SFTTrainer\nSFTTrainer('org/model').train()", "SFTTrainer: this trainer is used, too: only"),
        ("for p in model.parameters():\n    p.requires_grad = False", "p.requires_grad = False: all weights are"),
        ("model.lm_head.requires_grad_(False)", "model.lm_head.requires_grad_(False): all weights are trained here"),
    ],
)
def test_what_cannot_be_read_is_told(
    change: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, comments = converted("trl", AFTER.format(change=change), tmp_path / "a.py", capsys, code=2)
    assert any(line.startswith(f"  {told}") for line in comments), comments


OPTIONS = """
import argparse, os
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM
from trl import GRPOConfig as Settings, GRPOTrainer
@dataclass
class Mine:
    temperature: float = field(default=0.8, metadata={"help": "of the samples"})
    clip: float = 0.3
class Fixed:
    KL = 0.02
def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="org/model")
    parser.add_argument("--learning-rate", type=float, default=2e-6)
    parser.add_argument("--decay", dest="weight_decay", type=float, default=0.1)
    parser.add_argument("--vllm", action="store_true")
    return parser.parse_args()
def main(opts):
    mine = Mine(clip=0.25)
    more = dict(num_generations=4, **{"max_steps": 30})
    args = Settings("out", learning_rate=opts.learning_rate, weight_decay=opts.weight_decay, use_vllm=opts.vllm,
        temperature=mine.temperature, epsilon=mine.clip, beta=Fixed.KL, seed=int(os.environ.get("SEED", "7")), **more)
    model = AutoModelForCausalLM.from_pretrained(opts.model, torch_dtype="auto")
    GRPOTrainer(model, reward_funcs=[length], args=args).train()
main(parse_args())
"""


def test_options_and_fields_have_their_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, _ = converted("trl", OPTIONS, tmp_path / "a.py", capsys)
    expected = {"model.optim.lr=2e-06", "model.optim.weight_decay=0.1", f"{GRPO}.temperature=0.8", "seed=7"}
    expected |= {f"{GRPO}.clip_low=0.25", f"{GRPO}.kl_coef=0.02", f"{GRPO}.samples_per_prompt=4", "run_dir=out"}
    expected |= {f"{GRPO}.max_steps=30", "pretrained_checkpoint.restore_from_path=org/model"}
    assert expected <= set(overrides)


def test_the_options_of_a_script_that_starts_it_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(OPTIONS)
    text = "accelerate launch --num_processes 4 a.py --model org/model_name_or_path --learning-rate 5e-6 --decay=0"
    overrides, comments = converted("trl", text, tmp_path / "run.sh", capsys)
    expected = {"model.optim.lr=5e-06", "model.optim.weight_decay=0", "trainer.devices=4", f"{GRPO}.prompts_per_step=8"}
    assert expected <= set(overrides)
    assert not any("one was assumed" in line for line in comments)


PARSER = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
class Mine:
    group: int = 16
class Own(GRPOConfig):
    beta: float = 0.05
parser = TrlParser((Mine, Own, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.num_generations = script_args.group
trainer = GRPOTrainer(model=model_args.model_name_or_path, reward_funcs=length, args=training_args)
"""


def test_the_options_of_trl_s_parser_are_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(PARSER)
    (tmp_path / "c.yaml").write_text("learning_rate: 1e-5\ntemperature: 0.7\ngroup: 8\nmax_steps: 3\n")
    text = "python a.py --config c.yaml --model_name_or_path org/m --temperature 0.9"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    expected = {"model.optim.lr=1e-05", f"{GRPO}.temperature=0.9", f"{GRPO}.samples_per_prompt=8"}
    assert expected | {f"{GRPO}.kl_coef=0.05", "pretrained_checkpoint.restore_from_path=org/m"} <= set(overrides)
    (tmp_path / "c.yaml").unlink()
    _, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2)
    assert "  c.yaml: this file is missing: put it where the script names it, and convert again" in comments
    (tmp_path / "a.py").unlink()
    _, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2)
    assert any(line.startswith("  a.py: this file is missing, and what it sets was not read") for line in comments)


@pytest.mark.parametrize("classes", ["kinds", "dataclass_types=kinds"])
def test_a_parser_s_classes_may_have_a_name(classes: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = PARSER.replace("parser = TrlParser((Mine, Own, ModelConfig))", f"parser = TrlParser({classes})")
    (tmp_path / "a.py").write_text(f"def some():\n    kinds = [Mine, Own, ModelConfig]\n{text}")
    text = "python a.py --model_name_or_path org/m --temperature 0.9 --max_steps 3 --group 8"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    assert {"pretrained_checkpoint.restore_from_path=org/m", f"{GRPO}.temperature=0.9"} <= set(overrides)
    (tmp_path / "a.py").write_text((tmp_path / "a.py").read_text().replace("    kinds =", "    types ="))
    _, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2)
    assert "  kinds: what the parser fills has no value here: name GRPOConfig in its call" in comments


@pytest.mark.parametrize(
    "call", ["main(*parser.parse_args_and_config())", "given = parser.parse_args_and_config()\nmain(*given)"]
)
def test_a_function_gets_what_the_parser_returns(call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, _, body = PARSER.partition("script_args, training_args, model_args = parser.parse_args_and_config()\n")
    lines = [f"    {line}" for line in ["setattr(training_args, 'temperature', 0.6)", *body.splitlines()]]
    lines = [before, "def main(script_args, training_args, model_args):", *lines, call, ""]
    (tmp_path / "a.py").write_text("\n".join(lines))
    text = "python a.py --model_name_or_path org/m --group 4 --max_steps 3"
    overrides, _ = converted("trl", text, tmp_path / "run.sh", capsys)
    expected = {"pretrained_checkpoint.restore_from_path=org/m", f"{GRPO}.samples_per_prompt=4"}
    assert expected | {f"{GRPO}.temperature=0.6", f"{GRPO}.kl_coef=0.05"} <= set(overrides)


@pytest.mark.parametrize(
    "text",
    [
        "model, tokenizer = FastLanguageModel.from_pretrained(max_seq_length=512, model_name='org/m')",
        "model, _ = FastModel.from_pretrained('org/m')\nmodel = FastModel.get_peft_model(model, r=8)",
        "model = AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path='org/m')",
        "model = transformers.Qwen2ForCausalLM.from_pretrained('org/m')",
    ],
)
def test_a_model_has_the_name_that_from_pretrained_gets(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text += "\nGRPOTrainer(model, length, GRPOConfig(max_steps=1))"
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code=2 if "peft" in text else 0)
    assert "pretrained_checkpoint.restore_from_path=org/m" in overrides
    assert any(line.startswith("peft_config=") for line in map(str.strip, comments)) == ("peft" in text)


@pytest.mark.parametrize(
    ("use", "counts"),
    [
        ("print(lora, f'{lora}')\nGRPOTrainer('m', f, args)", False),
        ("print(lora.r)\nGRPOTrainer('m', f, args, peft_config=None)", False),
        ("GRPOTrainer('m', f, args, peft_config=lora)", True),
        ("model.add_adapter(lora)\nGRPOTrainer(model, f, args)", True),
        ("GRPOTrainer('m', f, args, **{'peft_config': lora})", True),
        ("GRPOTrainer('m', f, args, peft_config=LoraConfig(r=4))", True),
    ],
)
def test_lora_counts_where_it_is_passed_on(
    use: str, counts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"lora = LoraConfig(r=8)\nargs = GRPOConfig(max_steps=1)\n{use}"
    _, comments = converted("trl", text, tmp_path / "a.py", capsys, code=2 if counts else 0)
    assert any(line.strip().startswith("peft_config=") for line in comments) == counts


@pytest.mark.parametrize("change", ["kw = dict(beta=0.1)\nkw['beta'] = 0.2", "kw = {}\nkw.update(beta=0.2)"])
def test_a_mapping_that_changes_is_not_known(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{change}\nGRPOConfig(max_steps=1, **kw)"
    overrides, comments = converted("trl", text, tmp_path / "a.py", capsys, code=2)
    assert f"{GRPO}.kl_coef=0.1" not in overrides
    assert "  **kw: the settings of this mapping have no value here" in comments


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from trl import RLOOConfig as GRPOConfig\nGRPOConfig(beta=0.1)", "RLOOConfig"),
        ("import trl\ntrl.DPOTrainer('m', args=trl.DPOConfig(beta=0.1), peft_config=LoraConfig(r=8))", "DPOTrainer"),
        ("from trl.experimental.async_grpo import AsyncGRPOConfig\nAsyncGRPOConfig(max_steps=9)", "AsyncGRPOConfig"),
        ("from trl.experimental import gmpo as g\ng.GMPOConfig(max_steps=9)", "GMPOConfig"),
        ("from trl import SFTConfig as GRPOConfig\nGRPOConfig(max_steps=9)", "SFTConfig"),
        ("from trl import *\nfrom trl import TrlParser, KTOConfig\nTrlParser((KTOConfig,))", "KTOConfig"),
    ],
)
@pytest.mark.parametrize("file", ["a.py", "run.sh"])
def test_other_trainers_of_trl_are_refused(
    text: str, name: str, file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "run.sh").write_text("python a.py --learning_rate 1e-6 --beta 0.1")
    if file == "a.py" or "Trainer" in text or "GRPOConfig" in text:
        assert cli.main(["convert", "trl", str(tmp_path / file)]) == 2
        assert f"{file}: expected a GRPOConfig of TRL; got {name}, which is not converted" in caplog.text


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [
        ("AutoModelForCausalLM.from_pretrained('m', torch_dtype=torch.bfloat16)", "dtype=bfloat16: the weights are", 0),
        (
            "AutoModelForCausalLM.from_pretrained('m', dtype='float32')",
            "no override needed for 1 settings: 1 the same here",
            0,
        ),
        ("FastLanguageModel.from_pretrained('m', load_in_4bit=True)", "load_in_4bit=True: the model's weights have", 2),
        ("AutoModelForCausalLM.from_pretrained('m', quantization_config=q)", "quantization_config=q has no value", 2),
        ("GRPOConfig(max_steps=9, model_init_kwargs={'torch_dtype': 'auto'})", "kwargs.torch_dtype=auto: the weig", 0),
    ],
)
def test_the_numbers_of_the_weights_are_told(
    text: str, told: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text if "GRPOConfig" in text else f"GRPOTrainer({text}, length, GRPOConfig(max_steps=9))"
    text += "\nr = AutoModelForSequenceClassification.from_pretrained('r', dtype=torch.float16)"
    _, comments = converted("trl", text, tmp_path / "a.py", capsys, code)
    assert any(told in line for line in comments), comments
    assert not any("float16" in line for line in comments if "bfloat16" not in line)


@pytest.mark.parametrize(
    ("given", "precision"),
    [("bf16=False", "32"), ("bf16=None", "bf16"), ("", "bf16")],
)
def test_without_bf16_the_numbers_have_32_bits(
    given: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOTrainer('org/model', length, GRPOConfig(max_steps=9, {given}))"
    overrides, _ = converted("trl", text, tmp_path / "a.py", capsys)
    expected = {f"trainer.precision={precision}", f"model.megatron_amp_O2={str(precision == 'bf16').lower()}"}
    assert expected <= set(overrides)


@pytest.mark.parametrize("weights", ["[1, 0.5, 0.2]", "weights"])
def test_weights_that_do_not_fit_the_rewards_are_told(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"GRPOConfig(max_steps=1, reward_weights={weights})\nGRPOTrainer('m', reward_funcs=[a, b])"
    _, comments = converted("trl", text, tmp_path / "a.py", capsys, code=2)
    assert any(line.endswith("expected a list of 2 numbers, one per reward function") for line in comments)


@pytest.mark.parametrize(
    ("text", "told", "code"),
    [
        (
            '{"gradient_clipping": "auto", "optimizer": {"type": "AdamW"}}',
            "no override needed for 1 settings: 1 the same here",
            0,
        ),
        ('{"gradient_clipping": 1}', "cluster=laptop", 0),  # that of max_grad_norm
        (
            '{"gradient_clipping": 0.5}',
            "trainer.gradient_clip_val: deepspeed.gradient_clipping=0.5, max_grad_norm=1",
            2,
        ),
        ('{"optimizer": {"type": "Lamb"}}', "deepspeed.optimizer.type=Lamb: the optimizer is AdamW here", 2),
        ('{"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}', "no override needed for 2 settings: 2 the sa", 0),
        ('{"optimizer": {"type": "Adam", "params": {"adam_w_mode": 0}}}', "params.adam_w_mode=0: the weight", 2),
        ('{"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}', "deepspeed.optimizer.params.lr=0.0001: with", 2),
        ('{"scheduler": {"type": "WarmupLR"}}', "deepspeed.scheduler.type=WarmupLR: DeepSpeed's schedule acts", 2),
        (None, "deepspeed=ds.json: this file is not beside the script and was not read", 0),
    ],
)
@pytest.mark.parametrize("is_named", [True, False])
def test_the_configuration_of_deepspeed_is_read(
    text: str | None, told: str, code: int, is_named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "ds.json").write_text(text)
    given = "'ds.json'" if is_named or text is None else text
    _, comments = converted("trl", f"GRPOConfig(max_steps=9, deepspeed={given})", tmp_path / "a.py", capsys, code)
    assert any(told in line for line in comments), comments


OWN = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from trl.rewards import accuracy_reward, get_soft_overlong_punishment
class Mine:
    reward_funcs: list[str] = None
known = {"accuracy_reward": accuracy_reward, "sop": get_soft_overlong_punishment(max_completion_len=9)}
mine, args, model = TrlParser((Mine, GRPOConfig, ModelConfig)).parse_args_and_config()
functions = [known[name] for name in mine.reward_funcs]
args.model_init_kwargs = dict(revision=model.model_revision, attn_implementation=model.attn_implementation{})
GRPOTrainer(model.model_name_or_path, functions, args, peft_config=get_peft_config(model))
"""


@pytest.mark.parametrize(
    ("more", "flags", "asked"),
    [
        ("", "", []),
        ("", "--use_peft", ["use_peft=True: all weights are trained here"]),
        (", rope=compute()", "", ["model_init_kwargs.rope: model_init_kwargs.rope=compute() has no value here"]),
    ],
)
def test_what_a_script_of_trl_leaves_to_its_command_line_is_asked_for_only_if_given(
    more: str, flags: str, asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN.replace("{}", more))
    text = f"python own.py --model_name_or_path org/m --max_steps 9 --reward_funcs accuracy_reward {flags}"
    _, comments = converted("trl", text, tmp_path / "run.sh", capsys, code=2 if asked else 0)
    start = comments.index("set this yourself:") + 1 if asked else 0
    assert [line.strip().startswith(one) for one, line in zip(asked, comments[start:], strict=False)] == [True] * len(
        asked
    )
    assert any(line.startswith("reward (reward_funcs=accuracy_reward): add") for line in comments)
    assert not any("get_soft_overlong_punishment" in line or "peft_config" in line for line in comments)


def test_the_yaml_of_an_sft_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    text = "model_name_or_path: org/m\nlearning_rate: 1e-5\nmax_steps: 9\npacking: false\n"
    (tmp_path / "sft.yaml").write_text(text)
    assert cli.main(["convert", "trl", str(tmp_path / "sft.yaml")]) != 0
    assert "packing trains by supervised fine-tuning" in caplog.text
    converted("trl", f"{text}num_generations: 8\n", tmp_path / "grpo.yaml", capsys, code=2)  # packing: unknown

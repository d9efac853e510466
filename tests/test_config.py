"""Every shipped configuration loads, and every wrong one is refused with its key, its value and what would be right."""

import itertools
import shutil
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from nemo_prorl import settings
from nemo_prorl.config import Config, all_keys
from nemo_prorl.errors import ConfigError
from nemo_prorl.launcher.prepare import start_faults
from tests import paper_model
from tests.data.preparing import touch_prepared

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

OPTIONS = settings.group_options()
BASE = "pretrained_checkpoint.restore_from_path"


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """Names only: what the checks look at, not a model."""
    return paper_model.write(tmp_path / "qwen")


# Options that change nothing by design: the arms of an ablation that the default, or another arm, is already.
EQUAL = {"reset_none": "prorl", "entropy_kl": "clip_high_0p2"}
LOADED: dict[str, str] = {}  # name of an option or of a pair, by what it loads as


def differs_from_all_before(cfg: DictConfig, name: str) -> None:
    """An option that loads as another one does is not read, or is a second name."""
    other = LOADED.setdefault(OmegaConf.to_yaml(cfg), name)
    assert other in (name, EQUAL.get(name, name)) or EQUAL.get(other) == name


@pytest.mark.starts
@pytest.mark.parametrize(("cluster", "stage"), itertools.product(OPTIONS["cluster"], OPTIONS["stage"]))
def test_every_cluster_loads_with_every_stage(cluster: str, stage: str, model_folder: Path) -> None:
    overrides = [f"cluster={cluster}", f"stage={stage}"]
    if cluster.startswith(("h100", "gpu")):
        overrides.append(f"pretrained_checkpoint.restore_from_path={model_folder}")
    cfg = settings.load(overrides)
    assert cfg.stage == stage
    assert cfg.model.encoder_seq_length == cfg.trainer.grpo.context_tokens
    cfg.pretrained_checkpoint.restore_from_path = None  # another folder in each test
    differs_from_all_before(cfg, f"{cluster} {stage}")


REST = [(group, option) for group in OPTIONS if group not in ("cluster", "stage") for option in OPTIONS[group]]


@pytest.mark.parametrize(("group", "option"), REST)
def test_every_option_of_the_other_groups_loads(group: str, option: str) -> None:
    touch_prepared(Path("prepared"))
    given = [f"{group}={option}", f"{BASE}=null"]
    given += ["cluster=h100_4x8"] if group == "model" and option != "laptop" else []  # needs GPUs
    given += ["trainer.grpo.context_tokens=2048"] if option == "prorl" and group == "data" else []  # prompts of 1,024
    cfg = settings.load(given)
    cfg.seed = list(OPTIONS).index(group)  # the default of each group is the same run
    differs_from_all_before(cfg, option)


def test_the_paper_s_numbers(model_folder: Path) -> None:
    """Sections 3.1, 4.1, 4.2 and 5.1 of arXiv 2507.12507, as the cluster configuration resolves them."""
    given = ["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={model_folder}"]
    cfg = settings.load([*given, "stage=run1"])
    grpo = cfg.trainer.grpo
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef, grpo.temperature) == (0.2, 0.4, 1e-4, 1.2)
    assert (grpo.prompts_per_step, grpo.samples_per_prompt, grpo.updates_per_step) == (256, 16, 4)
    assert (grpo.context_tokens, cfg.model.optim.lr) == (8192, 2e-6)
    assert (cfg.trainer.num_nodes, cfg.trainer.devices) == (4, 8)
    stages = [settings.load([*given, f"stage=run{i}"]).trainer.grpo for i in range(1, 9)]
    assert [s.samples_per_prompt for s in stages] == [16, 16, 16, 16, 16, 32, 32, 16]
    assert [s.context_tokens for s in stages] == [8192] * 7 + [16384]
    assert [s.max_steps for s in stages] == [400, 300, 300, 200, 200, 300, 300, 200]
    assert [s.unfinished_factor for s in stages] == [1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.1]  # the authors' code
    assert {s.unfinished_penalty for s in stages} == {0}


def test_prorl_v2_is_as_nvidia_publishes_it() -> None:
    """NeMo-RL: examples/configs/prorlv2.v2.yaml; OpenRLHF: examples/scripts/train_prorlv2_math_hybrid_engine.sh."""
    cfg = settings.load(["algorithm=prorl_v2"])
    grpo = cfg.trainer.grpo
    assert (grpo.clip_low, grpo.clip_high, grpo.kl_coef, grpo.kl_estimator) == (0.2, 0.27, 1e-4, "k2")
    correction = (grpo.correction.kind, grpo.correction.floor, grpo.correction.cap)
    assert correction == ("icepop", 0.5, 5.0)
    assert (grpo.advantage, grpo.aggregation, grpo.temperature) == ("reinforce_pp_baseline", "token", 1.0)
    assert (grpo.unfinished_factor, grpo.shaping.cosine, grpo.dynamic_sampling.enabled) == (0.0, False, True)
    assert cfg.trainer.resets.every is None
    resets = settings.load(["algorithm=prorl_v2_resets"])
    assert (resets.trainer.resets.every, resets.trainer.grpo.shaping.cosine) == (400, True)
    assert resets.trainer.grpo.clip_high == 0.27


@pytest.mark.parametrize("cluster", [name for name in OPTIONS["cluster"] if name.startswith("h100")])
def test_gpus_begin_with_what_evidence_speaks_for(cluster: str) -> None:
    """The reasons stand beside the keys, in conf/model/qwen2_1p5b.yaml."""
    model = settings.load([f"cluster={cluster}", "pretrained_checkpoint.restore_from_path=null"]).model
    assert (model.bias_activation_fusion, model.apply_rope_fusion) == (False, False)
    assert model.activations_checkpoint_granularity is None
    assert model.gradient_accumulation_fusion is True
    fp8 = cluster.endswith("_fp8")
    assert (model.fp8, model.fp8_recipe) == ("hybrid" if fp8 else None, "tensorwise")


def test_without_overrides_it_is_the_laptop_job() -> None:
    cfg = settings.load([])
    assert (cfg.run_dir, cfg.trainer.accelerator, cfg.trainer.devices, cfg.rollout.engines) == (
        "runs/laptop",
        "cpu",
        1,
        1,
    )
    assert (cfg.trainer.grpo.temperature, cfg.trainer.grpo.samples_per_prompt) == (1.2, 16)


def test_overrides_reach_their_keys() -> None:
    cfg = settings.load(
        ["seed=7", "trainer.resets.at_steps=[3]", "model.optim.lr=2e-6", "trainer.grpo.correction={kind: none}"]
        + ["trainer.grpo.max_response_tokens=40", "rewards.plugins.math.timeout_s=3", "+model.gc_interval=1"]
        + ["run_dir='runs/with space'", "stage=run6"]
    )
    assert (cfg.seed, cfg.trainer.resets.at_steps, cfg.model.optim.lr) == (7, [3], 2e-6)
    assert (cfg.trainer.grpo.correction.kind, cfg.trainer.grpo.max_response_tokens) == ("none", 40)
    assert (cfg.rewards.plugins.math.timeout_s, cfg.model.gc_interval) == (3, 1)
    assert (cfg.run_dir, cfg.trainer.grpo.samples_per_prompt) == ("runs/with space", 32)


def test_the_home_folder_may_be_written_as_a_tilde_in_each_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A shell leaves `~` as it is after a key with a dot, and inside of quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = paper_model.write(tmp_path / "model's")
    for text in (
        "pretrained_checkpoint.restore_from_path=~/model's",
        "pretrained_checkpoint.restore_from_path='~/model\\'s'",
    ):
        assert settings.load(["cluster=h100_4x8", text]).pretrained_checkpoint.restore_from_path == str(model)
    cfg = settings.load(["run_dir=~/run", "data.train=[{name: a, path: '~/a.jsonl'}]"])
    assert (cfg.run_dir, cfg.data.train[0].path) == (f"{tmp_path}/run", f"{tmp_path}/a.jsonl")
    with pytest.raises(ConfigError, match=f"config_dir=~/conf: expected a folder|{tmp_path}/conf"):
        settings.load(["config_dir=~/conf"])
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "mine.yaml").write_text("# @package data\ntrain: []\n")
    with pytest.raises(ConfigError, match=r"data.train=\[\]: expected at least one source"):
        settings.load(["config_dir=~/conf", "data=mine"])


def test_a_value_override_wins_over_its_group() -> None:
    assert settings.load(["trainer.grpo.samples_per_prompt=8", "stage=run6"]).trainer.grpo.samples_per_prompt == 8


# The sizes that the messages below name, whatever the laptop job's are.
SIZES = ["model.num_layers=4", "model.hidden_size=128", "model.ffn_hidden_size=384", "model.num_attention_heads=4"]
SIZES += ["model.num_query_groups=2", "model.max_position_embeddings=32768", "trainer.grpo.context_tokens=128"]
SIZES += ["trainer.grpo.max_response_tokens=null", "trainer.grpo.max_steps=120", "trainer.grpo.prompts_per_step=48"]
AHEAD = ["cluster=laptop_split"]

# Overrides, and what the message must name: key, value and the fix.
WRONG: list[tuple[list[str], list[str]]] = [
    (["trainer.grpo.nope=1"], ["trainer.grpo.nope", "1", "trainer.grpo has no 'nope'", "kl_coef"]),
    (["trainer.grpo.kl_coeff=1"], ["trainer.grpo.kl_coeff", "Did you mean trainer.grpo.kl_coef?"]),
    (["model.grpo.kl_coef=1"], ["model.grpo.kl_coef", "Did you mean trainer.grpo.kl_coef?"]),
    (["grpo.kl_coef=1"], ["Did you mean trainer.grpo.kl_coef?"]),
    (["trainr.devices=2"], ["trainr.devices", "Did you mean trainer.devices?"]),
    (["model.hiden_size=64"], ["model.hiden_size", "model.hidden_size? Known in model: activation"]),
    (["model.seq_len_interpolation_factor=2"], ["write +model.seq_len_interpolation_factor=2."]),
    (
        ["+model.lora.rank=8"],
        ["model.lora={'rank': 8}: adapters such as LoRA are not supported; all weights are trained"],
    ),
    (
        ["model.peft.peft_scheme=lora"],
        ["unknown key model.peft.peft_scheme", "Adapters such as LoRA are not supported"],
    ),
    (["lora_rank=8"], ["unknown key lora_rank (=8)", "all weights are trained. Fix: leave the key out"]),
    (["+model.nonsense=3"], ["model.nonsense=3: neither NeMo nor this project reads this key. Fix: leave it out"]),
    (
        ["+model.activation_checkpoint_granularity=full"],
        ["neither NeMo nor", "Fix: model.activations_checkpoint_granularity instead"],
    ),
    (["+model.optim.nonsense=1"], ["model.optim.nonsense=1: neither NeMo nor this project reads this key"]),
    (["+model.seed=4"], ["model.seed=4: the run sets it. Fix: seed instead"]),
    (["data.train=[{name: a, path: ~/a.jsonl}]"], ["a text with blanks, braces or ~ in quotes of its own"]),
    (["trainer.grpo.correction={knd: none}"], ["trainer.grpo.correction.knd", "correction.kind?"]),
    (["data.train.99.size=1"], ["data.train.99.size", "a list of"]),
    (["trainer.grpo.max_steps.x=1"], ["trainer.grpo.max_steps is a single value"]),
    (["+trainer.new=1"], ["trainer.new", "trainer has no 'new'"]),
    (["clustr=laptop"], ["clustr", "Did you mean cluster?"]),
    (["cluster=h100"], ["cluster=h100", "Did you mean h100_4x8?", "laptop_split, slurm_dev"]),
    (["stage=run9"], ["stage=run9", "run1, run2"]),
    (["model=foo"], ["model=foo", "laptop, qwen2_1p5b"]),
    (["seed"], ["'seed'", "KEY=VALUE"]),
    (["seed=1,2"], ["seed=1,2", "sweep"]),
    (["~seed"], ["~seed", "deleted"]),
    (["trainer.grpo.max_steps=abc"], ["trainer.grpo.max_steps=abc", "a whole number"]),
    (["trainer.grpo.max_steps=4.5"], ["trainer.grpo.max_steps=4.5", "a whole number"]),
    (["trainer.grpo.max_steps=1e3"], ["=1000.0: expected a whole number. Fix: trainer.grpo.max_steps=1000"]),
    (["trainer.resets=auto"], ["expected a mapping {key: value, ...}. Fix: trainer.resets.mode=auto"]),
    (["trainer.grpo.dynamic_sampling=false"], ["value, ...}. Fix: trainer.grpo.dynamic_sampling.enabled=false"]),
    (["model.micro_batch_tokens=64"], ["context_tokens=128", "Fix: model.micro_batch_tokens=128, or null"]),
    (["trainer.grpo.kl_coef=big"], ["trainer.grpo.kl_coef=big", "a number"]),
    (["deterministic=maybe"], ["deterministic=maybe", "true or false"]),
    (["seed=null"], ["seed=null: expected a whole number"]),
    (["trainer.resets.at_steps=3"], ["trainer.resets.at_steps=3", "a list"]),
    (["trainer.grpo=5"], ["trainer.grpo=5", "a mapping"]),
    (["model.optim.lr=abc"], ["model.optim.lr=abc", "a finite number"]),
    (["model.num_layers=2.5"], ["model.num_layers=2.5", "a whole number"]),
    (["model.num_layers=null"], ["model.num_layers=null: expected a whole number"]),
    (["model.sequence_parallel=1"], ["model.sequence_parallel=1", "true or false"]),
    (["trainer.grpo.max_steps=0"], ["trainer.grpo.max_steps=0", "at least 1"]),
    (["trainer.grpo.temperature=0"], ["trainer.grpo.temperature=0", "above 0"]),
    (["trainer.grpo.temperature=nan"], ["trainer.grpo.temperature=nan", "finite"]),
    (["trainer.grpo.kl_coef=-0.1"], ["trainer.grpo.kl_coef=-0.1", "at least 0"]),
    (["trainer.grpo.clip_low=1.5"], ["trainer.grpo.clip_low=1.5", "at most 1"]),
    (["trainer.grpo.dual_clip=0.5"], ["trainer.grpo.dual_clip=0.5", "above 1"]),
    (["trainer.deadlines.rollout_s=0"], ["trainer.deadlines.rollout_s=0", "above 0"]),
    (["model.optim.lr=-1"], ["model.optim.lr=-1", "at least 0"]),
    (["model.optim.betas=[0.9,1.0]"], ["model.optim.betas", "1.0"]),
    (["trainer.grpo.correction.kind=tiss"], ["trainer.grpo.correction.kind=tiss", "none, tis, icepop, sequence_mask"]),
    (["trainer.grpo.advantage=gae"], ["trainer.grpo.advantage=gae", "group_norm, leave_one_out"]),
    (["trainer.grpo.aggregation=sum"], ["trainer.grpo.aggregation=sum", "token, sequence, constant"]),
    (["trainer.grpo.kl_estimator=k4"], ["trainer.grpo.kl_estimator=k4", "k1, k2, k3"]),
    (["trainer.precision=8"], ["trainer.precision=8", "bf16"]),
    (["trainer.precision=16"], ["trainer.precision=16", "32, 32-true, bf16, bf16-mixed"]),
    (["trainer.precision=bf16"], ["model.megatron_amp_O2=false", "expected true if trainer.precision=bf16"]),
    (["model.megatron_amp_O2=true"], ["model.megatron_amp_O2=true", "expected false if trainer.precision=32"]),
    (["trainer.accelerator=tpu"], ["trainer.accelerator=tpu", "cpu, gpu"]),
    (["trainer.resets.mode=always"], ["trainer.resets.mode=always", "manual, advise, auto"]),
    (["trainer.resets.rules.asks=[kl]"], ["trainer.resets.rules.asks=['kl']", "validation_drop, plateau, kl_spike"]),
    (["trainer.resets.mode=trial", "data.validation=[]"], ["data.validation", "expected held-out prompts"]),
    (
        ["trainer.resets.mode=trial", "trainer.resets.trial_steps=9"],
        ["trainer.resets.trial_steps=9", "validate_every=20", "Fix: trainer.resets.trial_steps=80"],
    ),
    (
        ["trainer.resets.mode=trial", "trainer.resets.rules.asks=[]", "trainer.resets.every=null"],
        ["trainer.resets.mode=trial", "at_steps or every", "Fix: trainer.resets.every=500"],
    ),
    (["trainer.resets.mode=auto", "trainer.resets.rules.asks=[]"], ["trainer.resets.rules.asks=[]", "mode=advise"]),
    (["trainer.resets.rules.kl_factor=1"], ["trainer.resets.rules.kl_factor=1", "above 1"]),
    (["trainer.resets.every=0"], ["trainer.resets.every=0", "at least 1", "Fix: null switches regular resets off"]),
    (["trainer.resets.lr_factor=0"], ["trainer.resets.lr_factor=0", "above 0", "Fix: 1 leaves the rate as it is"]),
    (
        ["trainer.resets.at_steps=60"],
        ["trainer.resets.at_steps=60: expected a list", "Fix: trainer.resets.at_steps=[60]"],
    ),
    (["trainer.resets.at_steps=[121]"], ["1 to 120; got 121. Fix: other steps, or more of them"]),
    (["trainer.resets.warmup_steps=5"], ["Did you mean trainer.resets.lr_warmup_steps?"]),
    (["trainer.resets.rules.entropy_share=2"], ["trainer.resets.rules.entropy_share=2", "at most 1"]),
    (["model.optim.name=sgd"], ["model.optim.name=sgd", "mcore_distributed_optim"]),
    (
        ["model.tensor_model_parallel_size=3"],
        ["=3", "model.num_attention_heads=4", "4 / 3 = 1.33", "possible here: 1. Fix: model.ten"],
    ),
    (
        ["model.tensor_model_parallel_size=4", "trainer.devices=4"],
        ["model.tensor_model_parallel_size=4", "model.num_query_groups=2", "possible here: 1, 2"],
    ),
    (
        ["model.tensor_model_parallel_size=2", "trainer.devices=2", "model.ffn_hidden_size=383"],
        ["model.tensor_model_parallel_size=2", "model.ffn_hidden_size=383"],
    ),
    (["model.num_query_groups=3"], ["model.num_query_groups=3", "model.num_attention_heads=4"]),
    (["model.hidden_size=130"], ["model.num_attention_heads=4", "model.hidden_size=130", "130 / 4 = 32.5"]),
    (
        ["model.pipeline_model_parallel_size=3", "trainer.devices=3"],
        ["model.pipeline_model_parallel_size=3", "model.num_layers=4"],
    ),
    (
        ["model.tensor_model_parallel_size=2", "trainer.devices=3", "rollout.engines=1"],
        ["model.tensor_model_parallel_size=2", "3 ranks", "Fix: trainer.devices=2"],
    ),
    (
        ["model.sequence_parallel=true"],
        ["model.sequence_parallel=true", "model.tensor_model_parallel_size", "2 or more"],
    ),
    (
        ["model.sequence_parallel=true", "model.tensor_model_parallel_size=2", "trainer.devices=2"]
        + ["trainer.grpo.context_tokens=127"],
        ["trainer.grpo.context_tokens=127", "model.tensor_model_parallel_size=2"],
    ),
    (["model.transformer_engine=true"], ["model.transformer_engine=true", "trainer.accelerator is cpu"]),
    (
        ["trainer.grpo.updates_per_step=5"],
        ["trainer.grpo.updates_per_step=5", "trainer.grpo.prompts_per_step=48", "48 / 5 = 9.6"],
    ),
    (
        ["trainer.devices=64", "trainer.grpo.prompts_per_step=4", "trainer.grpo.samples_per_prompt=8"],
        ["4 / trainer.grpo.updates_per_step=4 x trainer.grpo.samples_per_prompt=8 = 8", "64 data-parallel ranks"],
    ),
    (["trainer.grpo.samples_per_prompt=1"], ["trainer.grpo.samples_per_prompt=1", "at least 2"]),
    (
        ["trainer.grpo.samples_per_prompt=1", "trainer.grpo.advantage=reinforce_pp_baseline"]
        + ["trainer.grpo.dynamic_sampling.enabled=false"],
        ["trainer.grpo.samples_per_prompt=1", "reinforce_pp_baseline", "every advantage is 0", "at least 2"],
    ),
    (["trainer.grpo.unfinished_factor=1.5"], ["trainer.grpo.unfinished_factor=1.5", "at most 1"]),
    (["trainer.grpo.correction.floor=3"], ["trainer.grpo.correction.floor=3", "cap=2"]),
    (
        ["trainer.grpo.context_tokens=40000"],
        ["trainer.grpo.context_tokens=40000", "model.max_position_embeddings=32768"],
    ),
    (["trainer.grpo.max_response_tokens=128"], ["trainer.grpo.max_response_tokens=128", "context_tokens=128"]),
    (["trainer.num_nodes=2"], ["trainer.num_nodes=2", "rollout.engines=1"]),
    (["rollout.tensor_parallel_size=3"], ["rollout.tensor_parallel_size=3", "model.num_attention_heads=4"]),
    (["trainer.accelerator=gpu", "rollout.engines=2"], ["rollout.engines=2", "= 2 GPUs", "trainer.devices=1 = 1"]),
    (["cluster=laptop_split", "rollout.sleep=2"], ["rollout.sleep=2", "rollout.own_devices=true"]),
    (
        [*AHEAD, "trainer.grpo.dynamic_sampling.max_staleness=0"],
        ["rollout.own_devices=true", "trainer.grpo.dynamic_sampling.max_staleness=1"],
    ),
    (
        [*AHEAD, "trainer.grpo.correction.kind=none"],
        ["rollout.own_devices=true", "trainer.grpo.correction.kind"],
    ),
    (["trainer.resets.at_steps=[3,500]"], ["trainer.resets.at_steps=[3, 500]", "500", "1 to 120"]),
    (["trainer.resets.at_steps=[0]"], ["trainer.resets.at_steps=[0]"]),
    (["trainer.resets.at_steps=[3,3]"], ["trainer.resets.at_steps=[3, 3]", "twice"]),
    (["pretrained_checkpoint.restore_from_path=/nowhere"], ["restore_from_path=/nowhere", "/nowhere does not exist"]),
    (["cluster=h100_4x8"], ["pretrained_checkpoint.restore_from_path must be given"]),
    (["data.train=mine.jsonl"], ["data.train=mine.jsonl", "a list of sources, such as [{name: mine, path: FILE}]"]),
    (["data.train=[]"], ["data.train=[]", "at least one source to train on"]),
    (["trainer.grpo.context_tokens=64", "data.max_prompt_tokens=64"], ["data.max_prompt_tokens=64", "leave room"]),
    (["data.retire_after=0"], ["data.retire_after=0", "at least 1"]),
    (["data.retire_rate=0.9"], ["data.retire_rate=0.9", "data.retire_after=N"]),
    (["data.retire_rate=1.1", "data.retire_after=1"], ["data.retire_rate=1.1", "at most 1"]),
    (["data.train=[{name: x}]"], ["data.train.0 (x)", "expected either path or generator; got neither"]),
    (["data.train=[{name: x, generator: arithmetic}]"], ["data.train.0.size", "number of records"]),
    (
        ["model=Qwen/Qwen2.5-0.5B"],
        ["no such option", "Known: laptop", "pretrained_checkpoint.restore_from_path=Qwen/Qwen2.5-0.5B"],
    ),
    (
        ["data.train={name: units, path: a}"],
        ["data.train.name=units: data.train is a list. Fix: write data.train=[{name: units, ...}]"],
    ),
    (
        ["data.train=[{name: x, generator: arithmetik, size: 3}]"],
        ["data.train.0.generator=arithmetik", "expected one of arithmetic, code", "reasoning_gym:DATASET"],
    ),
    (["data.train=[{name: x, pth: a}]"], ["data.train: unknown key pth. Did you mean path?"]),
    (["data.train=[{generator: arithmetic, size: 3}]"], ["data.train", "name"]),
    (["data.train=[{name: x, generator: arithmetic, size: 3, weight: 0}]"], ["data.train.0.weight=0", "above 0"]),
    (
        ["data.train=[{name: x, generator: arithmetic, size: 3},{name: x, generator: arithmetic, size: 3}]"],
        ["data.train.1.name=x", "another source"],
    ),
    (["run_dir=${nowhere}"], ["nowhere"]),
    (
        [
            "cluster=h100_4x8",
            "pretrained_checkpoint.restore_from_path=null",
            "model.fp8=hybrid",
            "model.fp8_recipe=null",
        ]
        + ["model.num_query_groups=4"],
        ["model.fp8_recipe=null", "tensorwise"],
    ),
]


@pytest.mark.parametrize(("overrides", "named"), WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG])
def test_a_wrong_value_is_named_with_its_fix(overrides: list[str], named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings.load([*SIZES, *overrides])
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "model.hidden_size=64",
            "model.hidden_size=64: .* got 64 / model.num_attention_heads=4 = 16. Fix: another model",
        ),
        (
            "model.kv_channels=40",
            "model.kv_channels=40: expected attention heads of 32, 48, .*256, 512 values, for which",
        ),
        ("model.kv_channels=48", None),
    ],
)
@pytest.mark.parametrize("need_files", [True, False])  # False: `prorl plan`
def test_engines_on_cpus_compute_some_sizes_of_heads_only(
    override: str, says: str | None, need_files: bool, tmp_path: Path
) -> None:
    words = [*SIZES, override, f"run_dir={tmp_path}"]
    if says is None:
        assert settings.load_run(words, need_files=need_files).model.kv_channels == 48
    else:
        with pytest.raises(ConfigError, match=says):
            settings.load_run(words, need_files=need_files)


def test_every_number_of_the_schema_has_a_range() -> None:
    bounded = {key.name for key in all_keys() if (key.rule.least, key.rule.above) != (None, None) or key.rule.choices}
    numbers = {key.name for key in all_keys() if key.kind in (int, float)}
    seeds = {"data.train.*.seed", "data.validation.*.seed"}  # any whole number
    unused = {"model.virtual_pipeline_model_parallel_size", "model.micro_batch_tokens"}  # checked beside other keys
    assert numbers - bounded == seeds | unused


def test_every_key_has_a_line_with_its_meaning() -> None:
    """A field without a rule is a section of keys."""

    def lines(section: Any, prefix: str = "") -> set[str]:
        hints = get_type_hints(section)
        kinds = {prefix + f.name: hints[f.name] for f in fields(section)}
        below = [lines(kind, f"{name}.") for name, kind in kinds.items() if is_dataclass(kind)]
        return {name for name, kind in kinds.items() if not is_dataclass(kind)}.union(*below)

    assert lines(Config) <= {key.name for key in all_keys() if key.rule.meaning}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class TestModelFolder:
    """`pretrained_checkpoint.restore_from_path`: what is missing or does not fit is said."""

    @staticmethod
    def message(folder: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            settings.load_run(["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={folder}"])
        assert "restore_from_path" in str(caught.value)
        assert str(folder) in str(caught.value)
        return str(caught.value)

    def test_without_weights(self, model_folder: Path) -> None:
        (model_folder / "model.safetensors").unlink()
        told = self.message(model_folder)
        assert f"={model_folder}: no weights (*.safetensors). Fix: copy the model's model.safetensors, or all" in told
        assert f"hf download NAME --include '*.safetensors' --local-dir {model_folder}" in told
        (model_folder / "pytorch_model.bin").touch()
        assert "Fix: convert pytorch_model.bin with transformers: python -c" in self.message(model_folder)
        plan = settings.load(["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={model_folder}"])
        assert [warns for error, warns in start_faults(plan) if "no weights" in str(error)] == [True]

    def test_without_config(self, model_folder: Path) -> None:
        (model_folder / "config.json").unlink()
        assert "config.json" in self.message(model_folder)

    def test_with_a_broken_config(self, model_folder: Path) -> None:
        (model_folder / "config.json").write_text('{\n"hidden_size": 1\n"x": 2}')
        assert f"{model_folder}/config.json:3: expected JSON: " in self.message(model_folder)
        assert "Fix: repair it, or copy the model's file again" in self.message(model_folder)
        (model_folder / "config.json").write_text("[]")
        assert "config.json: expected a JSON object; got list. Fix: " in self.message(model_folder)

    @pytest.mark.parametrize(
        ("said", "named"),
        [
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "or 'llama3' with factor, low_freq_factor"),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling={'type': 'yarn'"),
            ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters={'rope_type': 'linear'"),
            (
                {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
                "rope_theta=10000.0 and rope_parameters.rope_theta=1000000.0: expected one value",
            ),
            (
                {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
                "rope_scaling.type=default and rope_parameters.rope_type=llama3: expected one value",
            ),
            ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters={'full_attention'"),
            ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; expected 'silu'"),
            ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
            ({"model_type": "gemma2"}, "model_type='gemma2' is not supported; expected one of qwen2, qwen3, llama"),
            ({"model_type": None}, "model_type=None is not supported"),
            ({"model_type": "llama", "attention_bias": True}, "attention_bias=True is not supported for llama"),
            ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True is not supported for qwen3"),
            ({"mlp_bias": True}, "mlp_bias=True is not supported"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
            ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
            ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
            ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
            ({"rms_norm_eps": "1e-6"}, 'rms_norm_eps="1e-6": expected a number above 0. Fix: the model'),
            ({"rope_theta": 0}, "rope_theta=0: expected a number above 0"),
            ({"num_hidden_layers": None}, "num_hidden_layers=null: expected a whole number"),
            ({"max_position_embeddings": "many"}, 'max_position_embeddings="many": expected a whole number'),
        ],
        ids=str,
    )
    def test_that_the_actor_would_compute_otherwise(self, model_folder: Path, said: dict[str, Any], named: str) -> None:
        paper_model.write(model_folder, **said)
        assert named in self.message(model_folder)

    def test_with_plain_rotary_embeddings_of_either_form(self, model_folder: Path) -> None:
        for said in (
            {"rope_theta": 10000, "rope_scaling": None, "hidden_act": "silu", "use_sliding_window": False},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        ):
            paper_model.write(model_folder, **said)
            settings.load(["cluster=h100_4x8", f"pretrained_checkpoint.restore_from_path={model_folder}"])

    @pytest.mark.parametrize(
        ("said", "derived"),
        [
            ({"num_hidden_layers": 32}, {"num_layers": 32, "qkv_bias": True, "qk_layernorm": False}),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None},
                {"rotary_base": 10**6},
            ),
            ({"model_type": "llama", "rms_norm_eps": 1e-5}, {"qkv_bias": False, "layernorm_epsilon": 1e-5}),
            ({"model_type": "qwen3", "head_dim": 256}, {"qk_layernorm": True, "qkv_bias": False, "kv_channels": 256}),
            ({"head_dim": 128}, {"kv_channels": None}),
            ({"tie_word_embeddings": True}, {"share_embeddings_and_output_weights": True}),
            ({"num_key_value_heads": None}, {"num_query_groups": 12}),
            (
                {
                    "rope_scaling": {
                        "rope_type": "llama3",
                        "factor": 32.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 8192,
                    }
                },
                {"scale_positional_embedding": True, "scale_factor": 32.0, "old_context_len": 8192},
            ),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("cluster", ["laptop", "h100_4x8"])
    def test_gives_the_model_s_keys(
        self, model_folder: Path, said: dict[str, Any], derived: dict[str, Any], cluster: str
    ) -> None:
        paper_model.write(model_folder, **said)
        cfg = settings.load([f"cluster={cluster}", f"pretrained_checkpoint.restore_from_path={model_folder}"])
        assert {key: cfg.model[key] for key in derived} == derived

    def test_with_heads_that_engines_on_cpus_cannot_compute_is_for_gpus(self, model_folder: Path) -> None:
        paper_model.write(model_folder, num_attention_heads=64, num_key_value_heads=2)
        folder = f"pretrained_checkpoint.restore_from_path={model_folder}"
        with pytest.raises(ConfigError, match="model.hidden_size=1536: expected attention heads of 32, .* = 24"):
            settings.load_run(["cluster=laptop", folder], need_files=False)
        assert settings.load_run(["cluster=h100_4x8", folder], need_files=False).model.num_attention_heads == 64

    @pytest.mark.parametrize(
        ("override", "value"),
        [("num_layers=4", 28), ("qkv_bias=false", True), ("kv_channels=64", None), ("rotary_base=20000", 10000)],
    )
    def test_refuses_a_key_that_contradicts_it(self, model_folder: Path, override: str, value: Any) -> None:
        given = ["cluster=laptop", f"pretrained_checkpoint.restore_from_path={model_folder}"]
        with pytest.raises(ConfigError) as caught:
            settings.load([*given, f"model.{override}"])
        said = override.replace("false", "False")
        assert str(caught.value).startswith(f"model.{said}: expected {value}, as in the config.json of")
        assert f"model.{override.split('=')[0]} out" in str(caught.value)

    def test_a_key_that_repeats_it_is_no_contradiction(self, model_folder: Path) -> None:
        settings.load([f"pretrained_checkpoint.restore_from_path={model_folder}", "model.num_layers=28"])


def save(cfg: DictConfig, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(settings.resolved_yaml(cfg))


class TestConfigFile:
    def test_a_saved_configuration_loads_as_it_was(self, tmp_path: Path) -> None:
        cfg = settings.load(["seed=5", "stage=run6", "+model.gc_interval=1"])
        save(cfg, tmp_path / "run")
        again = settings.load([], tmp_path / "run" / "config.yaml")
        assert OmegaConf.to_container(again) == OmegaConf.to_container(cfg)
        assert settings.resolved_yaml(again) == settings.resolved_yaml(cfg)

    def test_values_override_it_and_groups_do_not(self, tmp_path: Path) -> None:
        save(settings.load([]), tmp_path / "run")
        file = tmp_path / "run" / "config.yaml"
        assert settings.load(["trainer.grpo.max_steps=200"], file).trainer.grpo.max_steps == 200
        with pytest.raises(ConfigError, match="stage=run1.*whole configuration"):
            settings.load(["stage=run1"], file)

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("a: [", ["cannot be read as yaml"]),
            ("- 1", ["a yaml mapping"]),
            ("trainer: {grpo: {kl_coeff: 1}}", ["trainer.grpo.kl_coeff", "trainer.grpo.kl_coef?"]),
            ("trainer: {grpo: {kl_coef: big}}", ["trainer.grpo.kl_coef", "a number"]),
            ("seed: 3", ["pretrained_checkpoint.restore_from_path must be given"]),
            ("pretrained_checkpoint: {restore_from_path: null}", ["model.num_layers", "a whole number"]),
        ],
        ids=["syntax", "list", "key", "type", "missing", "no model"],
    )
    def test_a_wrong_file_is_named(self, tmp_path: Path, text: str, named: list[str]) -> None:
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            settings.load([], file)
        for part in named:
            assert part in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="gone.yaml"):
            settings.load([], tmp_path / "gone.yaml")


class TestContinuing:
    """A run directory that holds a run is continued, and only by what may change."""

    START = ("run_dir=held", "seed=2", "trainer.grpo.max_steps=50")

    @pytest.fixture(autouse=True)
    def held(self, in_an_empty_folder: None) -> None:
        save(settings.load([*self.START]), Path("held"))

    def test_the_run_s_own_configuration_is_the_base(self) -> None:
        cfg = settings.load_run(["run_dir=held"])
        assert (cfg.seed, cfg.trainer.grpo.max_steps) == (2, 50)

    def test_the_same_command_continues(self) -> None:
        assert settings.load_run([*self.START]).seed == 2
        assert settings.load_run([*self.START, "cluster=laptop"]).seed == 2

    def test_another_folder_is_another_run(self) -> None:
        assert settings.load_run(["run_dir=other", "seed=9"]).seed == 9

    @pytest.mark.parametrize(
        "override",
        ["seed=3", "trainer.grpo.kl_coef=0.1", "model.optim.lr=1", "model.hidden_size=64", "deterministic=true"]
        + ["trainer.resets.parts=reference", "trainer.resets.lr_factor=0.5", "trainer.resets.lr_warmup_steps=3"]
        + ["data.train.0.weight=7", "stage=run2", "trainer.warmup.steps=1", "trainer.grpo.max_steps=49"],
    )
    def test_what_makes_another_run_is_refused(self, override: str) -> None:
        start = self.START if "stage" in override else ("run_dir=held",)
        with pytest.raises(ConfigError) as caught:
            settings.load_run([*start, override])
        assert "held" in str(caught.value)
        assert override in str(caught.value).replace("=True", "=true").replace("=1.0", "=1").replace("=7.0", "=7")

    def test_a_refusal_offers_a_fork_from_the_newest_checkpoint(self) -> None:
        with pytest.raises(ConfigError) as caught:
            settings.load_run(["run_dir=held", "seed=3"])
        assert str(caught.value).endswith("start another run with run_dir=...")
        for step in (20, 30):
            (Path("held/checkpoints") / f"step-{step:06d}").mkdir(parents=True)
        (Path("held/checkpoints") / "step-000020" / "state.json").write_text("{}")  # that of step 30 is not complete
        with pytest.raises(ConfigError) as caught:
            settings.load_run(["run_dir=held", "seed=3"])
        assert str(caught.value).endswith("or fork it: run_dir=NEW chain.start_from=held/checkpoints/step-000020")

    @pytest.mark.parametrize(
        "overrides",
        [
            ["trainer.grpo.max_steps=60"],
            ["trainer.devices=2", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
            ["trainer.num_nodes=2", "rollout.engines=2", "model.pipeline_model_parallel_size=2"],
            ["trainer.grpo.checkpoint_every=3", "trainer.grpo.keep_checkpoints=9"],
            ["trainer.deadlines.rollout_s=5", "exp_manager.create_wandb_logger=true", "rewards.workers=2"],
            ["trainer.resets.mode=auto", "trainer.resets.at_steps=[30]", "trainer.resets.roll_back=true"],
            ["trainer.resets.every=40", "trainer.resets.rules.drop_min=0.1", "trainer.resets.kl_after_reset=0.1"],
        ],
        ids=" ".join,
    )
    def test_what_may_change_is_taken(self, overrides: list[str]) -> None:
        cfg = settings.load_run(["run_dir=held", *overrides])
        key, value = overrides[0].split("=")
        assert str(OmegaConf.select(cfg, key)).removesuffix(".0") == value
        assert cfg.seed == 2

    def test_its_own_file_given_by_name_runs_again(self) -> None:
        assert settings.load_run([], Path("held/config.yaml")).seed == 2


class TestOwnFiles:
    """`config_dir` names a folder with more files of the groups."""

    @pytest.fixture
    def own(self, in_an_empty_folder: None) -> Path:
        folder = Path("own")
        for group in ("data", "cluster"):
            (folder / group).mkdir(parents=True)
        (folder / "data" / "mine.yaml").write_text(
            "# @package data\ntrain:\n  - {name: mine, path: '${config_dir}/mine.jsonl'}\nvalidation: []\n"
        )
        (folder / "cluster" / "ours.yaml").write_text(
            "# @package _global_\ndefaults: [laptop@_here_, _self_]\ntrainer: {grpo: {prompts_per_step: 24}}\n"
        )
        return folder

    def test_its_files_are_chosen_like_shipped_ones(self, own: Path) -> None:
        for given in (own, own.absolute()):
            cfg = settings.load([f"config_dir={given}", "data=mine", "cluster=ours", "seed=3"])
            assert (cfg.data.train[0].path, cfg.trainer.grpo.prompts_per_step, cfg.seed) == (
                str(own.absolute() / "mine.jsonl"),
                24,
                3,
            )
        assert settings.load([]).trainer.grpo.prompts_per_step == 48
        with pytest.raises(ConfigError, match=r"data=min: no such option. Did you mean mine\?"):
            settings.load([f"config_dir={own}", "data=min"])

    def test_a_saved_configuration_needs_the_folder_no_more(self, own: Path) -> None:
        cfg = settings.load([f"config_dir={own}", "data=mine", "run_dir=held"])
        save(cfg, Path("held"))
        shutil.rmtree(own)
        assert settings.load([], Path("held/config.yaml")).data.train[0].path == cfg.data.train[0].path

    def test_a_wrong_folder_or_file_is_named(self, own: Path) -> None:
        with pytest.raises(ConfigError, match="config_dir=nowhere: expected a folder with files of the groups"):
            settings.load(["config_dir=nowhere"])
        (own / "data" / "laptop.yaml").write_text("# @package data\n")
        with pytest.raises(ConfigError, match="data/laptop.yaml has the name of a shipped file"):
            settings.load([f"config_dir={own}"])
        (own / "data" / "laptop.yaml").unlink()
        (own / "data" / "mine.yaml").write_text("# @package data\ntrain: [{bogus: 1}]\n")
        with pytest.raises(ConfigError, match=r"own: Hydra cannot compose(.|\n)*data/mine(.|\n)*bogus"):
            settings.load([f"config_dir={own}", "data=mine"])
        (own / "data" / "mine.yaml").write_text("train: [\n  - {a: b\n")
        with pytest.raises(ConfigError, match=r"own: Hydra cannot compose(.|\n)*mine.yaml\", line 2"):
            settings.load([f"config_dir={own}", "data=mine"])


def test_configuration_is_found_where_the_package_is() -> None:
    """As package data: not by the current folder, and with every yaml file that the repository ships."""
    assert settings.conf_folder().is_dir()
    assert {"algorithm", "cluster", "data", "model", "stage"} <= set(OPTIONS)
    for file in settings.conf_folder().rglob("*.yaml"):
        assert isinstance(yaml.safe_load(file.read_text()), dict)


def test_what_a_later_override_replaces_does_not_disturb_a_continued_run(tmp_path: Path) -> None:
    words = [f"run_dir={tmp_path}", "data.validation.0.size=16", "data.validation=[]"]
    cfg = settings.load(words)
    assert cfg.data.validation == []
    (tmp_path / "config.yaml").write_text(settings.resolved_yaml(cfg))
    assert settings.load(words, tmp_path / "config.yaml").data.validation == []
    assert settings.load(["trainer.resets.every=3", "trainer.resets={mode: auto}"]).trainer.resets.every == 3

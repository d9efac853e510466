"""Conversion of another trainer's settings into overrides of this project.

The rules take the settings that they convert out of `Converted.rest`, which begins as the file's settings over the
other trainer's defaults.  So a number that the file leaves out becomes an override, too.
"""

import functools
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from nemo_prorl.migration import our, shared
from nemo_prorl.migration.converted import SAME, Converted
from nemo_prorl.migration.defaults import NO_DEFAULT, defaults, source
from nemo_prorl.migration.files import SCRIPT
from nemo_prorl.migration.names import entry, known, meant, table
from nemo_prorl.migration.nemo_rl import nemo_rl
from nemo_prorl.migration.openrlhf import openrlhf
from nemo_prorl.migration.shell import ENTRY, PASSED_ON, UNREAD, Absent, Expression
from nemo_prorl.migration.trl import trl
from nemo_prorl.migration.verl import verl

RULES: dict[str, Callable[[Converted], None]] = {"trl": trl, "verl": verl, "nemo_rl": nemo_rl, "openrlhf": openrlhf}
_LIMIT = {"model.micro_batch_tokens": 16384, "rollout.max_batched_tokens": 16384}  # of cluster=h100_4x8
_GPUS_PER_NODE = 8  # of cluster=h100_4x8
_PROMPT_ROOM = 1024  # tokens of the context for prompts, where the other trainer does not limit them
# What decides the algorithm: if no rule could set one of these, the user must.
_DECIDE = {
    *(f"model.optim.{key}" for key in ("lr", "weight_decay", "betas", "eps", "sched.name")),
    *(our.LOSS, our.CLIP_LOW, our.CLIP_HIGH, our.DUAL_CLIP, our.KL, our.ESTIMATOR, our.ENTROPY, our.ADVANTAGE),
    *(our.AGGREGATION, our.PROMPTS, our.GROUP, our.UPDATES, our.CONTEXT, our.RESPONSE, our.PROMPT),
    *(our.CLIP, f"{our.GRPO}.temperature", f"{our.CORRECTION}.kind", f"{our.SAMPLING}.enabled"),
}
_NULLABLE = {our.DUAL_CLIP, our.RESPONSE, our.PROMPT}
_PERIODS = {f"{our.GRPO}.{key}" for key in ("checkpoint_every", "keep_checkpoints", "keep_best", "validate_every")}
_NO_LIMIT = 100_000  # steps of NeMo-RL that no run makes
_EPOCHS = "total_epochs", "num_train_epochs", "num_episodes", "max_num_epochs"
_OTHER_MODELS = re.compile(r"(?i)-a\d+b|[-/]moe|mixtral|gpt-oss|deepseek-v\d|-vl\b|-omni|vision")
_PLACEHOLDER = re.compile(r"(?i)to_be_filled|\byour|[\[<>]")  # a list: words that no quotation keeps together
_OTHER_FAMILIES = re.compile(  # as ORG/NAME; a name with Qwen or Llama says what it is made from
    r"(?i)([\w.-]+/)?((?!.*(qwen|llama))(glm|minimax|gemma|mistral|ministral|phi|nvidia-nemotron|nemotron-[h3])-"
    r"|qwen3\.5|qwen3-next|llama-?4)[^/]*"
)
_SETTING = re.compile(r"\{([\w.]+)\}")
_ENTRIES = "scripts/grpo.py", "scripts/grpo_vlm.py", "trl/scripts/rloo.py"  # TRL's own: they set nothing
_RECOMPUTE = re.compile(r"(enable_gradient|\bgradient|policy\.\w+\.activation)_checkpointing(_enable)?$")


def convert(trainer: str, settings: Mapping[str, Any]) -> Converted:
    """Convert another trainer's settings into overrides of this project.

    Args:
        trainer: the other trainer, such as `nemo_rl`: the name of its table.
        settings: {dotted key: value} of that trainer's configuration.
    """
    tables = table(trainer)
    named = {tables["aliases"].get(key, key): _plain(value) for key, value in settings.items() if key != ENTRY}
    for key, value in named.items():
        if not _fits(value, usual := tables["defaults"].get(key)):
            named[key] = Absent(f"is {value!r}; expected a value such as the default, {usual!r}")
    rest = {**defaults(trainer, named), **named}
    program, reason = entry(trainer, settings.get(ENTRY, []))
    unread = _unread(rest, trainer) | ({program: reason} if reason else {})
    made = Converted(rest=dict(rest), unknown=unread, given=frozenset(named), entry=program, usual=tables["defaults"])
    _ask_unknown(made, tables)
    _switch_off(made, named, tables)
    own = named.keys() | {key for key, value in rest.items() if value != tables["defaults"].get(key)}
    own |= rest.keys() - made.rest.keys()
    _ask_older(made, [key for key in settings if key in tables.get("gone", ())], own, tables)
    for key, ours in tables["keys"].items():
        if key in made.rest and _is_usable(key, ours, value := made.take(key), made):
            made.overrides.setdefault(ours, value)
    RULES[trainer](made)
    _tell(made, rest, tables)
    shared.tell_data(made, **tables["data"])
    _lengths(made)
    _scale_clip(made, tables)
    _devices(made)
    _refused(made)
    for ours in sorted(_DECIDE - made.overrides.keys() - made.unknown.keys()):
        made.unknown[ours] = "it follows from a setting that has no value here"
    if our.MODEL not in made.overrides:
        key = next(key for key, ours in tables["keys"].items() if ours == our.MODEL)
        made.unknown.setdefault(our.MODEL, f"the file has no model ({key})")
    made.overrides = {key: value for key, value in made.overrides.items() if key not in made.unknown}
    _sort_rest(made, named, trainer)
    made.notes.append(f"what the file leaves out has the defaults of {source(trainer, named)}")
    if "run_dir" not in made.overrides | made.unknown:
        made.notes.append("run_dir=DIR names the folder of the run; without it, the folder is runs/laptop")
    made.notes.append("cluster=h100_4x8 is for GPUs; without a GPU take cluster=laptop")
    _name_as_given(made, {tables["aliases"][key]: key for key in settings if key in tables["aliases"]})
    return made


def _ask_unknown(made: Converted, tables: Mapping[str, Any]) -> None:
    """Take the settings without a value, and leave what they decide to the user."""
    for key, ours in (tables["derived"] | tables["keys"]).items():
        if isinstance(made.rest.get(key), Expression):
            earlier = f"{made.unknown[ours]}; " if ours in made.unknown else ""
            made.unknown[ours] = f"{earlier}{_without_value(key, made.take(key))}"


def _ask_older(made: Converted, older: list[str], own: Container[str], tables: Mapping[str, Any]) -> None:
    """Leave the defaults that have changed to the user, if the file has keys of older releases.

    Args:
        own: keys that the file sets, or that have no effect.
    """
    asked = [key for key in tables.get("changed", ()) if older and key not in own]
    for key in asked:
        past = ", ".join(f"{value} up to release {until}" for until, value in tables["changed"][key].items())
        made.rest[key] = Absent(f"is not in the file; its default was {past}, and is {made.usual.get(key)} today")
    _ask_unknown(made, tables)
    if asked:
        made.notes.append(
            f"{', '.join(older)}: of older releases; what the file leaves out may have other defaults there"
        )


def _tell(made: Converted, settings: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Tell what the table has for the values of these settings, which are the other trainer's, and for those here."""
    values = {**settings, **made.overrides, **made.unknown}
    for part, sentences in (("told", made.differs), ("noted", made.notes)):
        for conditions, text in tables.get(part, []):
            if all(_holds(values.get(key), wanted) for key, wanted in conditions.items()):
                sentences.append(_SETTING.sub(lambda match: str(values[match[1]]), text))
                made.rest = {key: value for key, value in made.rest.items() if f"{{{key}}}" not in text}


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool):
        return bool(value) == wanted
    if isinstance(wanted, str) and wanted[0] == "<":
        return isinstance(value, int | float) and value < float(wanted[1:])
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def _unread(rest: dict[str, Any], trainer: str) -> dict[str, str]:
    """Take what was not read out of the settings; return {its name: what the user should do}."""
    script = rest.pop(SCRIPT, None)
    unread = {key.removeprefix(UNREAD): rest.pop(key) for key in [key for key in rest if key.startswith(UNREAD)]}
    if script is not None and trainer == "trl" and not str(script).endswith(_ENTRIES):
        unread[str(script)] = "this file is missing, and what it sets was not read: put it beside the script"
    return unread


def _fits(value: Any, default: Any) -> bool:
    """Return whether a value has the type of the default; None and an unknown value fit, and all fit to no default."""
    number, kind = int | float, type(default)
    if default is None or value is None or isinstance(value, Expression) or kind in (bool, str):
        return True
    return isinstance(value, number if isinstance(default, number) else kind)


def _plain(value: Any) -> Any:
    """Return an `Expression` for a text or a list with a reference that has no value."""
    items = value if isinstance(value, list) else [value]
    unclear = any(isinstance(item, Expression) or (isinstance(item, str) and "${" in item) for item in items)
    return Expression(value) if unclear else value


def _is_usable(key: str, ours: str, value: Any, made: Converted) -> bool:
    if ours in _PERIODS | {our.STEPS} and isinstance(value, int | float) and value < 1:
        default = "" if key in made.given else " (the default)"
        means = f"{key}={value}{default} means never; here {our.keeps(ours)}"
        if value > 0 and our.STEPS in made.overrides:
            made.overrides[ours] = math.ceil(value * made.overrides[our.STEPS])
        elif value > 0:
            made.unknown[ours] = f"{key}={value} is a share of all steps"
        else:
            made.notes += [means] if ours != our.STEPS else []  # the epochs decide
        return False
    if key == "grpo.max_num_steps" and value is not None and value >= _NO_LIMIT:
        return False  # the epochs end the run
    return value not in (None, "") or ours in _NULLABLE


def _switch_off(made: Converted, named: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Take the settings that have no effect because of another one of the other trainer, and tell which these are."""
    for need, patterns in tables["needs"].items():
        switch, equals, values = need.partition("!=" if "!=" in need else "=")
        value = named.get(switch, made.rest.get(switch))
        is_off = not value or str(value).lower() in ("no", "none", "false")
        if values and not isinstance(value, Expression):
            is_off = (str(value) in values.split("|")) == (equals == "!=")
        if is_off:
            unused = {key: made.take(key) for key in list(made.rest) if _matches(key, patterns)}
            made.tell_unused(unused, f"with {switch}={value}" if values else f"without {switch}")


def _matches(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern is the last part of a key, or stands for the whole key."""
    last = key.rsplit(".", 1)[-1]
    return any(pattern in (key, last) or ("*" in pattern and fnmatchcase(key, pattern)) for pattern in patterns)


def _sort_rest(made: Converted, named: Mapping[str, Any], trainer: str) -> None:
    """Sort the settings that no rule took into differences, settings that need no override, and those left over."""
    tables = table(trainer)
    meanings = tables["meanings"]
    if made.take(PASSED_ON):
        made.differs.insert(0, 'the script has arguments of its own ("$@"): what you give it is not read here')
    order = {key: place for place, key in enumerate(meanings)}
    for key in sorted(made.rest, key=lambda key: (order.get(key, len(order)), key)):
        value, last = made.take(key), key.rsplit(".", 1)[-1]
        if last in _EPOCHS and our.STEPS not in made.overrides | made.unknown:
            made.unknown[our.STEPS] = _steps(made, key, value, "" if key in named else " (the default)")
        elif key in meanings:
            _sort_one(made, key, value, meanings[key], decides=key in tables["decides"])
        elif key not in named:
            continue
        elif last in _EPOCHS and trainer != "trl":  # TRL's max_steps counts alone
            made.notes.append(f"{key}={value}: the run ends there if the data end before {our.STEPS}")
        elif _RECOMPUTE.search(key) and value:
            made.notes.append(f"{key}={value}: add +model.activations_checkpoint_granularity=full if memory is short")
        else:
            _sort_by_patterns(made, key, value, trainer)


def _sort_by_patterns(made: Converted, key: str, value: Any, trainer: str) -> None:
    tables = table(trainer)
    if reason := next((reason for reason, patterns in tables["unused"].items() if _matches(key, patterns)), None):
        made.unused[key] = reason
    elif (mistake := _mistake(key, trainer)) is not None:
        made.misspelt[f"{key}={str(value)[:60]}"] = mistake
    elif row := next(
        (row for row in (tables["decides"] | tables["differs"]).items() if fnmatchcase(key, row[0])), None
    ):
        _sort_one(made, key, value, row[1], decides=row[0] in tables["decides"])
    elif "." not in key and trainer in ("verl", "nemo_rl"):
        made.unused[key] = "of another command"
    elif value is not None:
        made.left[key] = value


def _sort_one(made: Converted, key: str, value: Any, meaning: list[Any], decides: bool) -> None:
    """Sort a setting by the table: `meaning` has the values that mean the same here, and what another one means."""
    *same, text = meaning
    setting = f"{key}={str(value)[:60]}"
    if isinstance(value, Expression):
        made.unknown[key] = f"{_without_value(key, value)}; {f'unless it is {same[0]}: ' if same else ''}{text}"
    elif value in same and key in made.given:
        made.unused[key] = SAME
    elif value not in same and decides:
        made.unknown[setting] = text
    elif value not in same:
        made.differs.append(f"{setting}{'' if key in made.given else ' (the default)'}: {text}")


def _name_as_given(made: Converted, older: Mapping[str, str]) -> None:
    """Name settings as the file does; `older`: {today's name: name in the file}."""
    if not older:
        return
    words = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, older))})(?!\.?\w)")

    def told(text: str) -> str:
        return words.sub(lambda match: older[match[0]], text)

    made.unknown = {told(key): told(reason) for key, reason in made.unknown.items()}
    made.left = {told(key): value for key, value in made.left.items()}
    made.differs, made.notes = ([told(text) for text in texts] for texts in (made.differs, made.notes))


def _without_value(key: str, value: Any) -> str:
    return f"{key} {value}" if isinstance(value, Absent) else f"{key}={value} has no value here"


def _steps(made: Converted, key: str, epochs: Any, default: str) -> str:
    """Return the formula of the number of steps of a run of epochs."""
    if isinstance(epochs, Absent):
        return _without_value(key, epochs)
    prompts = "prompts of the training data"
    prompts = f"({prompts})" if made.most is None else f"min({made.most}, {prompts})"
    drawn = made.overrides.get(our.PROMPTS, our.PROMPTS) if made.drawn is None else f"{made.drawn:g}"
    text = f"{key}={epochs}{default}: {epochs} * {prompts} / {drawn} steps, which also decide the schedule of the"
    text += " learning rate"
    if made.overrides.get(f"{our.SAMPLING}.enabled"):
        text += "; the run there ends earlier, because groups that are left out take prompts of the data, too"
    return text


def _mistake(key: str, trainer: str) -> str | None:
    """Return what to say of a key with a part that the other trainer does not know; None if it knows all parts."""
    names, free = known(trainer, "." not in key)
    if "." not in key and trainer in ("verl", "nemo_rl"):  # a flag of another command of the script
        return None
    for part in key.split("."):
        if part in free:  # anything may be below it
            return None
        if part not in names:
            ours, keys = meant(key), table(trainer)["keys"] | table(trainer)["derived"]
            near = [other for other, override in keys.items() if override == ours and key.endswith(part)]
            near = near or get_close_matches(part, sorted(names), 1, cutoff=0.8)
            return f"did you mean {near[0]}?" if near else "no such setting"
    if "." not in key or key in [*_deciding(trainer), *table(trainer)["defaults"]]:
        return None
    section, *_, name = key.split(".")  # a name that decides, in another place of its section: policy.lr
    near = [other for other in _deciding(trainer) if other.startswith(f"{section}.") and other.endswith(f".{name}")]
    return f"did you mean {near[0]}?" if near else None


@functools.cache
def _deciding(trainer: str) -> list[str]:
    """Return the other trainer's keys that set what decides the algorithm."""
    return [key for key, ours in (table(trainer)["keys"] | table(trainer)["derived"]).items() if ours in _DECIDE]


def _devices(made: Converted) -> None:
    """Set the numbers of nodes and engines that fit the GPUs and the tensor parallelism; keep those that are set."""
    nodes, devices, tensor_parallel = "trainer.num_nodes", "trainer.devices", "rollout.tensor_parallel_size"
    overrides = made.overrides
    if asked := [made.unknown[key] for key in (nodes, devices, tensor_parallel) if key in made.unknown]:
        if not (any(reason.endswith(NO_DEFAULT) for reason in asked) or "rollout.engines" in overrides):
            made.unknown.setdefault("rollout.engines", f"{nodes} * {devices} / {tensor_parallel} of them fit the GPUs")
        return
    if devices in overrides:
        overrides.setdefault(nodes, 1)  # the default of the other trainers
    elif nodes not in overrides and overrides.get(tensor_parallel, 1) == 1:
        return
    if overrides.get("rollout.own_devices"):  # a rule has set the engines
        return
    if isinstance(each := overrides.get(devices), int) and each > _GPUS_PER_NODE:
        overrides["launch.gpus_per_node"] = each
    sizes = overrides.get(nodes, 4), overrides.get(devices, 8), overrides.get(tensor_parallel, 1)  # 4 x 8: the cluster
    if all(isinstance(size, int) and size > 0 for size in sizes):
        most = max(1, sizes[0] * sizes[1] // sizes[2])
        engines = overrides.setdefault("rollout.engines", most)
        if isinstance(engines, int) and engines > most:
            overrides["rollout.engines"] = most
            made.notes.append(
                f"rollout.engines={most} in place of {engines}, which have GPUs of their own there: engines and trainer"
                " share them here; cluster=h100_4x8_split parts them"
            )


def _refused(made: Converted) -> None:
    """Leave numbers to the user that no run of this project can have."""
    key = f"{our.SCHED}.warmup_steps"
    steps, warmup = made.overrides.get(our.STEPS), made.overrides.get(key)
    if isinstance(steps, int | float) and isinstance(warmup, int) and warmup > steps and our.STEPS not in made.unknown:
        reason = f"the run there ends after {steps:g} steps, within its warm-up of {warmup}"
        made.unknown.setdefault(
            key, f"{reason}; a run here is at least as long as its warm-up: set this, or more {our.STEPS}"
        )
    model = str(made.overrides.get(our.MODEL))
    if _PLACEHOLDER.search(model):
        made.unknown[our.MODEL] = f"{model}: a placeholder, not a model"
    elif _OTHER_MODELS.search(model):
        made.unknown[our.MODEL] = (
            f"{model}: a mixture of experts or a vision model, by its name; here are Qwen and Llama only"
        )
    elif _OTHER_FAMILIES.fullmatch(model):
        made.unknown[our.MODEL] = (
            f"{model}: of another family, by its name; here are Qwen2, Qwen2.5, Qwen3 and Llama only"
        )
    if made.overrides.get(our.GROUP) == 1:
        made.unknown.setdefault(
            our.GROUP, "1 there; here the responses to a prompt are compared, so at least 2 are needed"
        )


def _scale_clip(made: Converted, tables: Mapping[str, Any]) -> None:
    """Set the clipping of a gradient whose loss the other trainer divides by another number of tokens."""
    key = next(key for key, ours in (tables["keys"] | tables["derived"]).items() if ours == our.CLIP)
    context, clip, (name, tokens) = made.overrides.get(our.CONTEXT), made.overrides.get(our.CLIP), made.divisor
    if not name or not clip or our.CLIP in made.unknown:
        return
    number = tokens or "what divides a response there"
    text = f"{key}={clip} * {number} / {our.CONTEXT}: the loss, with its KL term, is divided by {name} there, by"
    text += " the context here; Adam hides the factor, but the clipping does not"
    if all(isinstance(value, int | float) for value in (clip, tokens, context)):
        made.overrides[our.CLIP] = float(f"{clip * tokens / context:.6g}")
        made.notes.append(f"{our.CLIP}={made.overrides[our.CLIP]:g} is {text}")
    else:
        made.unknown[our.CLIP] = text


def _lengths(made: Converted) -> None:
    """Set the context from prompt and response, if it is not set, and what must have room for a whole context."""
    overrides = made.overrides
    for key in (our.PROMPT, our.RESPONSE):
        if key not in made.unknown:
            overrides.setdefault(key, None)
    prompt, response = overrides.get(our.PROMPT), overrides.get(our.RESPONSE)
    if (
        our.CONTEXT not in overrides
        and isinstance(response, int)
        and not {our.PROMPT, our.RESPONSE} & made.unknown.keys()
    ):
        overrides[our.CONTEXT] = response + (prompt or _PROMPT_ROOM)
        if prompt is None:
            made.notes.append(
                f"prompts have no limit there: {our.CONTEXT} leaves {_PROMPT_ROOM} tokens for them; raise it for longer"
                " ones, which are an error here"
            )
    context = overrides.get(our.CONTEXT)
    if not isinstance(context, int):
        return
    for key in (our.PROMPT, our.RESPONSE):
        if (overrides.get(key) or 0) >= context:
            overrides[key] = None  # the context limits it
    for key, least in _LIMIT.items():
        if context > overrides.get(key, least):
            overrides[key] = context

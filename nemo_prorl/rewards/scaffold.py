"""`prorl rewards new`: a generator of plugin projects, with code, tests and prompt records, from template/."""

import re
from pathlib import Path

from nemo_prorl.errors import ConfigError
from nemo_prorl.files import new_folder
from nemo_prorl.rewards.discovery import discover

TEMPLATE = Path(__file__).parent / "template"
NAME = re.compile(r"[a-z][a-z0-9_]{0,28}[a-z0-9]")

_SANDBOX_NOTE = """

It needs the sandbox (`needs_sandbox = True`): `self.sandbox.run` runs a `Program` of the interface. A machine on which
no sandbox works refuses the plugin; `prorl rewards test` lists the checks that it skips."""
_NEXT = """{folder}: plugin {name!r}, with its tests and {count} prompt records
next:
  pip install --no-deps --no-build-isolation -e {folder}
  pytest {folder}
  prorl rewards test {name}
then replace the rule in {folder}/{package}/plugin.py with yours"""


def new_plugin(name: str, folder: Path, sandbox: bool = False) -> str:
    """Write the project; return the next steps.  Raises ConfigError for a bad or used name, or an existing folder."""
    _check(name, folder)
    package = f"prorl_reward_{name}"
    words = {
        "@NAME@": name,
        "@PACKAGE@": package,
        "@DISTRIBUTION@": package.replace("_", "-"),
        "@CLASS@": "".join(part.capitalize() for part in name.split("_")) + "Reward",
        "@SANDBOX@": "\n    needs_sandbox = True  # runs code that the model wrote" if sandbox else "",
        "@SANDBOX_NOTE@": _SANDBOX_NOTE if sandbox else "",
    }
    places = {"init.py": f"{package}/__init__.py", "plugin.py": f"{package}/plugin.py"}
    places["test_plugin.py"] = "tests/test_plugin.py"
    try:
        with new_folder(folder) as temporary:
            for source in sorted(TEMPLATE.glob("*.tmpl")):
                target = temporary / places.get(source.stem, source.stem)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(_filled(source.read_text(encoding="utf-8"), words), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}.  Fix: --dir OTHER") from error
    count = sum(len((folder / part).read_text().splitlines()) for part in ("prompts.jsonl", "heldout.jsonl"))
    return _NEXT.format(folder=folder, name=name, package=package, count=count)


def _filled(text: str, words: dict[str, str]) -> str:
    for mark, word in words.items():
        text = text.replace(mark, word)
    return text


def _check(name: str, folder: Path) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"plugin name {name!r}: must be 2 to 30 lower-case letters, digits and underscores, begin with a letter and"
            " end with a letter or digit, such as word_count"
        )
    known = discover()
    if name in known.plugins or name in known.broken:
        raise ConfigError(
            f"plugin name {name!r} is taken by an installed plugin.  Fix: uninstall it, or use another name"
        )
    if name in known.tasks():
        raise ConfigError(
            f"plugin name {name!r}: plugin {known.tasks()[name]!r} has a task of this name.  Fix: use another name"
        )
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists.  Fix: --dir OTHER")

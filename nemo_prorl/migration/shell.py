"""Reads the settings of a shell script: it evaluates what follows from the script itself, and runs nothing."""

import fnmatch
import operator
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import yaml

from nemo_prorl.migration.expansion import BLANK, UNKNOWN, closing, dollar, words_of

_LIST = "\ue002"  # before the mark of a variable that may have several words
UNREAD = "?"  # begins the key of something that was not read; the value says what the user should do
_WORDS = "what it sets or deletes has no value here, and may be any number here: write its words in its place"
_ARGUMENTS = re.compile(r'"\$([@*]|\{[@*][^}"]*\})"')  # of the script itself, in quotation marks
ENTRY = "entry"  # key with the modules and files that the script starts
PASSED_ON = "passed_on"  # key of the arguments of the script itself, which only its caller knows
_PASSED_ON = f" --{PASSED_ON} "
_COMMENT = re.compile(r"^\s*#.*\n", re.M)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)(\+?)=(?=\()")
_SETS = re.compile(r"(^|\s+)(--[A-Za-z]|[+~]*[A-Za-z][\w.@/-]*=)")  # in a text with words of a command
_OF_UNKNOWN = re.compile(rf"{UNKNOWN}\$(\w+|[{{(].*[)}}])")
_OVERRIDE = re.compile(r"\+*([A-Za-z_]\w*\.[\w.@/-]+)=(.*)", re.S)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_PYTHON, _FILE = re.compile(r"(^|/)python[\d.]*$"), re.compile(r"\.py$")
_NESTED = re.compile(r"(^|[\s/])(python[\d.]*|\S+\.py|openrlhf\S*|trl)\s")  # a command in quotation marks
_LAUNCHERS = re.compile(r"(torch\.distributed|accelerate)\b")  # modules that start another program
_OTHERS = {  # commands with options of their own
    "vllm", "huggingface-cli", "hf", "pip", "wget", "curl", "git", "cat", "echo", "docker", "wandb", "rsync", "aws",
    "gsutil", "conda", "tensorboard", "mkdir", "cp", "module", "kubectl", "nvidia-smi", "modal",
}  # fmt: skip
LAUNCH = {"num_processes", "nproc_per_node", "nnodes", "num_machines", "num_gpus", "num_nodes", "config_file"}
_STARTERS = {"ray", "srun", "scontrol"}  # without a program of Python, they start no trainer
_PREFIXES = ("then", "do", "{", "export", "declare", "local", "readonly")
_OPEN, _CLOSED = ("if", "for", "while", "until", "case"), ("fi", "done", "esac")
_BRACKETS = {"(": ")", "$(": ")", "${": "}", "[[": "]]"}
# A part of a line that is not divided: a quotation, an escaped character, a bracket, a separator.
_TOKEN = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|\$\(|\$\{|\[\[|\]\]|;;|&&|\|\||\$#", re.S)
_TEST = re.compile(r"\s*(!\s*)?(\[|test\b|\(\(|grep\b|command\b|which\b)")
_CASE, _PATTERN = re.compile(r"\s*case\s(.*?)\sin\b", re.S), re.compile(r"\s*\(?([^()]*)\)")
_COMPARE: dict[str, Callable[[int, int], bool]]
_COMPARE = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class Expression(str):
    """The source text of a setting that only the other trainer's program, or a shell, can compute."""


class Absent(Expression):
    """Where a setting is that was not read, as the rest of a sentence: `is in mine.yaml, which is missing`."""


class Command(NamedTuple):
    """A command of a script that may start a trainer.

    Attributes:
        script: the Python file that it starts, or None.
        launcher: (key, value) of the program that starts it, such as `accelerate launch`.
        settings: (key, value) of each `key=value` and `--key value`.
        text: the Python program that a here-document of the script gives to it, or None.
        entry: the module or the Python file that it starts, or None.
    """

    script: str | None
    launcher: list[tuple[str, Any]]
    settings: list[tuple[str, Any]]
    text: str | None = None
    entry: str | None = None


class _Branch(NamedTuple):
    """A branch of an `if`; another block of commands counts as one that may run.

    Attributes:
        runs: whether it runs; None: unknown.
        is_decided: whether an earlier branch, or this one, runs for certain; None: unknown.
    """

    runs: bool | None
    is_decided: bool | None = False

    def following(self, outcome: bool | None) -> "_Branch":
        """Return the branch behind this one, whose condition has this outcome."""
        decided = True if self.runs or self.is_decided else None if self.runs is None else self.is_decided
        runs = False if decided or outcome is False else None if decided is None else outcome
        return _Branch(runs, decided)


def _outcome(words: list[str]) -> bool | None:
    """Return the outcome of a condition such as `[[ a == b ]]`; None if it does not follow from the script."""
    if words[:1] == ["!"]:
        outcome = _outcome(words[1:])
        return None if outcome is None else not outcome
    if any(UNKNOWN in word for word in words):
        return None
    if words in (["true"], ["false"]):
        return words == ["true"]
    if words[:1] == ["case"]:  # of _of_case
        subject, patterns = " ".join(words[1 : words.index("in")]), words[words.index("in") + 1 :]
        return any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
    if len(words) < 2 or (words[0], words[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    match words[1:-1]:
        case ["-n" | "-z" as test, text]:
            return (text != "") == (test == "-n")
        case [left, "=" | "==" | "!=" as test, right] if not re.search(r"[*?\[]", right):
            return (left == right) == (test != "!=")
        case [left, test, right] if test in _COMPARE and re.fullmatch(r"-?\d+ -?\d+", f"{left} {right}"):
            return _COMPARE[test](int(left), int(right))
    return None


class Script:
    """A shell script.

    Variables, `${NAME:-DEFAULT}`, `$((...))` and arrays get the values that the script gives them; variables of the
    environment count as not set, and `$#` as 0: the script has no arguments.  A value that needs more, such as
    `$(date)`, is an `Expression`.

    Attributes:
        files: {name: text} of the files that the commands so far write from here-documents.
    """

    def __init__(self, text: str) -> None:
        self.files: dict[str, str] = {}
        self._documents: list[tuple[str, bool]] = []  # text, and whether variables in it get their values
        self._text = self._without_documents(_ARGUMENTS.sub(_PASSED_ON, text))
        self._known = {"HOME": os.path.expanduser("~"), "@": _PASSED_ON, "*": _PASSED_ON, "#": "0"}
        self._arguments = [_PASSED_ON.strip()] if "$#" in text else []  # the script reads its own
        self._arrays: dict[str, list[str]] = {}

    def commands(self) -> Iterator[Command]:
        """Yield the commands that may start a trainer, in their order."""
        yield from self._of_lines(_lines(self._text))

    def _without_documents(self, text: str) -> str:
        """Return the text with a number in place of each here-document's mark, and keep the documents."""
        kept: list[str] = []
        lines = iter(text.splitlines())
        for line in lines:
            marks = [] if line.lstrip().startswith("#") or "<<<" in line else list(_HEREDOC.finditer(line))
            for quoted, name in [(mark[1] != "", mark[2]) for mark in marks]:
                line = _HEREDOC.sub(f" <<{len(self._documents)} ", line, count=1)
                body = []
                for following in lines:
                    if following.strip() == name:
                        break
                    body.append(following)
                self._documents.append(("\n".join(body) + "\n", not quoted))
            kept.append(line)
        return "\n".join(kept) + "\n"

    def _of_lines(self, lines: list[str]) -> Iterator[Command]:
        branches, begun = list[_Branch](), 0
        for end in range(1, len(lines) + 1):
            runs = [branch.runs for branch in branches]
            arrays = dict(self._arrays) if False in runs else self._arrays  # what does not run sets nothing
            try:
                commands = _commands("\n".join(lines[begun:end]), self._known, arrays, is_certain=all(runs))
            except ValueError:  # an open quotation or bracket: the next line belongs to it
                continue
            begun = end
            for words in commands:
                if words[0] in _OPEN:
                    runs_body = _outcome(words[1:]) if words[0] in ("if", "while") else None
                    branches.append(_Branch(runs_body if words[0] == "if" else runs_body and None))
                elif words[0] in ("elif", "else") and branches:
                    branches[-1] = branches[-1].following(True if words[0] == "else" else _outcome(words[1:]))
                del branches[max(0, len(branches) - sum(word in _CLOSED for word in words)) :]
                runs = [branch.runs for branch in branches]
                if False in runs:
                    continue
                while words and (words[0] in _PREFIXES or re.fullmatch(r"-[a-zA-Z]", words[0])):  # export, declare -i
                    words = words[1:]
                yield from self._of_command(words, is_certain=all(runs))
        if begun < len(lines):
            yield from self._of_lines(lines[begun + 1 :])

    def _of_command(self, words: list[str], is_certain: bool) -> Iterator[Command]:
        if words and all(_ASSIGNMENT.match(word) for word in words):
            for word in words:
                name, added, value = _ASSIGNMENT.match(word).groups()  # type: ignore[union-attr]
                value = self._known.get(name, "") + value if added else value
                mark = _LIST * bool(_SETS.search(f"{self._known.get(name)} {value}")) + f"{UNKNOWN}${name}"
                self._known[name] = value if is_certain or self._known.get(name) == value else mark
            return
        words, document = self._redirected(words)
        nested = [word for word in words if re.search(r"\s", word) and _NESTED.search(word)]
        if nested and not any(_PYTHON.search(word) or _FILE.search(word) for word in words):
            for text in nested:  # bash -c '...', eval "...", COMMAND='...' sbatch
                yield from self._of_lines(_lines(re.sub(r"^(--)?[\w-]+=", "", text)))
            return
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        program = words[0].rsplit("/", 1)[-1] if words else ""
        if program == "read" and document:
            self._known[words[-1]] = document
        elif program in ("bash", "sh") and document:
            yield from self._of_lines(_lines(document))
        elif program == "trl" and words[1:2] not in (["grpo"], ["rloo"]):
            yield Command(None, [], [], entry=" ".join(words[:2]))
        elif words and program not in _OTHERS and (call := _command([*words, *self._arguments], document)) is not None:
            yield call

    def _redirected(self, words: list[str]) -> tuple[list[str], str | None]:
        """Return the words before the first redirection, and the here-document; keep what is written to a file."""
        first = next((at for at, word in enumerate(words) if re.match(r"\d?[<>]", word)), len(words))
        marks = [int(word[2:]) for word in words if re.fullmatch(r"<<\d+", word)]
        if not marks:
            return words[:first], None
        text, is_expanded = self._documents[marks[-1]]
        text = _document(text, self._known) if is_expanded else text
        targets = [
            (word.lstrip(">") or following)
            for word, following in zip(words, [*words[1:], ""], strict=True)
            if word.startswith(">")
        ]
        targets += words[1:2] if words[0] == "tee" else []
        for target in targets:
            self.files[target] = text
        return words[:first] + [
            word for word in words[first + 1 :] if targets == [] and not word.startswith(("<", ">"))
        ], text


def _lines(text: str) -> list[str]:
    """Return the simple commands of a script, one per line; one that another command decides is in an `if`."""
    text = _COMMENT.sub("", text + "\n").replace("\\\n", " ")
    try:
        parts = list(_parts(text))
    except ValueError:  # an open quotation or bracket
        return text.splitlines()
    lines: list[str] = []
    parts = list(_of_cases(parts))
    for (_, before), (joined, part), (following, _) in zip(
        [("", ""), *parts], parts, [*parts[1:], ("", "")], strict=False
    ):
        part = re.sub(r"^\s*((then|do)\b\s*)*", "", part)
        if re.match(r"else\b", part):
            lines.append("else")
            part = part[len("else") :].lstrip()
        if following in ("&&", "||"):  # the condition has another half
            part = re.sub(r"^((el)?if)\b.*", r"\1 :", part, flags=re.S)
        decides = joined == "||" or (joined == "&&" and _TEST.match(before))
        lines += ["if :", *part.splitlines(), "fi"] if decides else part.splitlines()
    return lines


def _of_cases(parts: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the parts with an `if` in place of each `case`, and an `elif` in place of each of its patterns."""
    subjects, is_pattern = list[str](), False
    for joined, part in parts:
        is_pattern |= joined == ";;" and bool(subjects)
        while match := _CASE.match(part) or (is_pattern and _PATTERN.match(part)):
            is_pattern, part = match.re is _CASE, part[match.end() :]
            if is_pattern:
                subjects.append(match[1])
                yield joined, "if false"
            else:
                yield "\n", f"elif case {subjects[-1]} in {match[1].replace('|', ' ')}"
            joined = "\n"
        if subjects and re.match(r"\s*esac\b", part):
            is_pattern, part = False, f"fi{part.split('esac', 1)[1]}"
            subjects.pop()
        yield joined, part


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield (separator before it, text) of each simple command: they end at line ends, `;`, `&&` and `||`.

    Raises ValueError for an open quotation or bracket.
    """
    separator, part, open_brackets, at = "", "", list[str](), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        token = match[0] if match else text[at]
        at += len(token)
        if token == "#" and not open_brackets and (not part or part[-1].isspace()):
            at = text.index("\n", at)
        elif open_brackets and token == open_brackets[-1]:
            open_brackets.pop()
            part += token
        elif token in _BRACKETS and (token != "[[" or not part.strip() or part[-1].isspace()):
            open_brackets.append(_BRACKETS[token])
            part += token
        elif not open_brackets and token in ("\n", ";", ";;", "&&", "||"):
            yield separator, part
            separator, part = token, ""
        else:
            part += token
    if open_brackets:
        raise ValueError(f"no closing {open_brackets[-1]}")
    yield separator, part


def _document(text: str, known: dict[str, str]) -> str:
    """Return a here-document with the values of its variables."""
    done, at = "", 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", "\\", "\n"):
            done, at = done + text[at + 1].strip("\n"), at + 2
        elif text[at] in "$`":
            value, end = dollar(text, at, known)
            done, at = done + (f"{UNKNOWN}{text[at:end]}" if value is None else value), end
        else:
            done, at = done + text[at], at + 1
    return done


def _command(words: list[str], document: str | None) -> Command | None:
    """Return the command that these words start, without the options of the programs before it."""
    modules = [at for at, word in enumerate(words) if word in ("-m", "--module") and at + 1 < len(words)]
    modules = [at for at in modules if not _LAUNCHERS.match(words[at + 1])]
    files = [at for at, word in enumerate(words) if _FILE.search(word) and not words[at - 1].startswith("--")]
    pythons = [at for at, word in enumerate(words) if _PYTHON.search(word)]
    start = min([*modules[:1], *files[:1]], default=pythons[0] if pythons else -1)
    if start < 0:
        settings = list(_of_words(words))
        is_trainer = not _STARTERS & set(words) and any(not key.startswith((UNREAD, PASSED_ON)) for key, _ in settings)
        return Command(None, [], settings, entry=" ".join(words[:2] * (words[0] == "trl"))) if is_trainer else None
    is_module = start in modules
    launcher = [pair for pair in _of_words(words[:start]) if pair[0] in LAUNCH]
    if re.search(r"vllm|serve|prepare|download|preprocess|^tests/|^openrlhf\.models\.", words[start + is_module]):
        return None
    script = words[start] if start in files else None
    entry = words[start + is_module] if is_module or script else None
    is_read = document is not None and start in pythons and not is_module
    settings = list(_of_words(words[start + 1 + is_module :]))
    return Command(script, launcher, settings, document if is_read else None, without_marks(entry))


def _commands(text: str, known: dict[str, str], arrays: dict[str, list[str]], is_certain: bool) -> list[list[str]]:
    """Return the words of each command of a line; raises ValueError for an open quotation or bracket."""
    if match := _ARRAY.match(text):
        end = closing(text, match.end())
        words = words_of(text[match.end() + 1 : end - 1], known, arrays)
        words = words if is_certain else _doubtful(words)
        arrays[match[1]] = [*arrays.get(match[1], []), *words] if match[2] else words
        return []
    commands: list[list[str]] = [[]]
    for word in words_of(text, known, arrays, punctuation=";&|"):
        if word and set(word) <= set(";&|"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def _doubtful(words: list[str]) -> list[str]:
    """Return the words of a branch, with values that count as unknown."""
    marked = []
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        name, equals, value = word.partition("=")
        if equals:
            marked.append(f"{name}={UNKNOWN}{value}")
        elif word.startswith("--"):
            marked.append(f"{word}={UNKNOWN}true" if following.startswith("--") else word)
        else:
            marked.append(f"{UNKNOWN}{word}")
    return marked


def _of_words(words: list[str]) -> Iterator[tuple[str, Any]]:
    flag: str | None = None
    values: list[Any] = []
    for word in [*words, "--"]:
        override = _OVERRIDE.fullmatch(word)
        if flag and not override and not word.startswith(("--", _LIST)):
            is_list = _OF_UNKNOWN.fullmatch(word) and (
                values or re.search("(?i)(arg|opt|option|flag|param)s|extra", word)
            )
            if is_list or (word[:1].isspace() and _SETS.match(word)):
                yield f"{UNREAD}{without_marks(word)}", _WORDS
            values.append(_value(word))
            continue
        if flag:
            is_known = not any(isinstance(value, Expression) for value in values)
            several = values if is_known else Expression(" ".join(map(str, values)))
            yield flag, several if len(values) > 1 else values[0] if values else True
        flag, values = None, []
        if override:
            yield override[1], _value(override[2])
        elif match := _ASSIGNMENT.fullmatch(word):  # a group of Hydra, such as model_engine=megatron
            yield match[1], _value(match[3])
        elif word.startswith("--") and UNKNOWN not in word.partition("=")[0]:
            name, equals, value = word[2:].partition("=")
            flag = None if equals else name.replace("-", "_")
            if equals:
                yield name.replace("-", "_"), _value(value)
        elif word.startswith("~") or (UNKNOWN in word and not re.match("-[^-]", word)) or _SETS.search(word):
            yield f"{UNREAD}{without_marks(word)}", _WORDS


def without_marks(value: Any) -> Any:
    """Return a value that a shell wrote into a file; what the shell computes is an `Expression`."""
    if isinstance(value, list):
        return [without_marks(item) for item in value]
    has_mark = isinstance(value, str) and UNKNOWN in value
    return Expression(re.sub(f"[{UNKNOWN}{_LIST}]", "", value).replace(BLANK, " ")) if has_mark else value


def _value(word: str) -> Any:
    if UNKNOWN in word:
        return without_marks(word)
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word

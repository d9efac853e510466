"""Read the signatures that the stand-in must have from Transformer Engine's sources, and write them as JSON.

    python tests/policy/te_signatures.py TRANSFORMER_ENGINE.git > tests/policy/te_signatures.json

Only facts are kept: names of parameters and the text of their defaults, with the commit that they come from.
Sources are parsed, never imported.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

COMMITS = {  # the first is what NVIDIA's NeMo 2.3 containers build; the stand-in equals it
    "bee4649c15a79ffcb9689ca7c0c963f5febaa28a": "2.2.0.dev0, requirements/manifest.json of NeMo 2.3",
    "v2.2": "2.2.0",
    "v2.3": "2.3.0",
}
# Where a class or function may be found, and what is compared: methods, or "()" for a function's own signature.
FILES = ["pytorch/attention.py", "pytorch/attention/dot_product_attention/dot_product_attention.py"]
ROTARY = ["pytorch/dot_product_attention/rope.py", "pytorch/attention/rope.py"]
WANTED: list[tuple[str, list[str], list[str]]] = [
    ("Linear", ["pytorch/module/linear.py"], ["__init__", "forward"]),
    ("LayerNormLinear", ["pytorch/module/layernorm_linear.py"], ["__init__", "forward"]),
    ("RMSNorm", ["pytorch/module/rmsnorm.py"], ["__init__"]),
    ("LayerNorm", ["pytorch/module/layernorm.py"], ["__init__"]),
    (
        "TransformerEngineBaseModule",
        ["pytorch/module/base.py"],
        ["set_tensor_parallel_group", "get_extra_state", "set_extra_state", "init_fp8_metadata"],
    ),
    ("DotProductAttention", FILES, ["__init__", "forward", "set_context_parallel_group"]),
    ("apply_rotary_pos_emb", ROTARY, ["()"]),
    ("fp8_autocast", ["pytorch/fp8.py"], ["()"]),
    ("fp8_model_init", ["pytorch/fp8.py"], ["()"]),
    ("checkpoint", ["pytorch/distributed.py"], ["()"]),
    (
        "CudaRNGStatesTracker",
        ["pytorch/distributed.py"],
        ["__init__", "reset", "get_states", "set_states", "add", "fork"],
    ),
    (
        "FusedAdam",
        ["pytorch/optimizers/fused_adam.py"],
        [
            "__init__",
            "zero_grad",
            "step",
            "initialize_state",
            "_initialize_state",
            "get_unscaled_state",
            "set_scaled_state",
            "state_dict",
            "load_state_dict",
        ],
    ),
    ("MultiTensorApply", ["pytorch/optimizers/multi_tensor_apply.py"], ["__init__", "__call__"]),
    ("DelayedScaling", ["common/recipe/__init__.py"], ["fields"]),
    ("Float8CurrentScaling", ["common/recipe/__init__.py"], ["fields"]),
    ("MXFP8BlockScaling", ["common/recipe/__init__.py"], ["fields"]),
    ("Format", ["common/recipe/__init__.py"], ["fields"]),
]
Parameters = list[list[str]]  # [name, default or ""]


def of_function(node: ast.FunctionDef) -> Parameters:
    """Return the parameters of a function: names, with * and ** in front, and the text of defaults."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [""] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    found = [[a.arg, d] for a, d in zip(positional, defaults, strict=True)]
    if arguments.vararg is not None:
        found.append([f"*{arguments.vararg.arg}", ""])
    elif arguments.kwonlyargs:
        found.append(["*", ""])
    found += [
        [a.arg, ast.unparse(d) if d is not None else ""]
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [*found, [f"**{arguments.kwarg.arg}", ""]] if arguments.kwarg is not None else found


def of_fields(node: ast.ClassDef) -> Parameters:
    """Return the fields of a data class, or the members of an enumeration."""
    found = []
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found.append([line.target.id, ast.unparse(line.value) if line.value is not None else ""])
        elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            found.append([line.targets[0].id, ast.unparse(line.value)])
    return found


def signatures(read: Callable[[str], str | None]) -> dict[str, Parameters]:
    """Return all wanted signatures by name; `read` gives the text of a file of `transformer_engine/`, or None."""
    found: dict[str, Parameters] = {}
    for name, files, parts in WANTED:
        texts = [text for text in map(read, files) if text is not None]
        nodes = [node for text in texts for node in ast.parse(text).body if getattr(node, "name", None) == name]
        if not nodes:
            raise SystemExit(f"{name}: expected in {' or '.join(files)}; not found")
        node = nodes[0]
        for part in parts:
            if isinstance(node, ast.FunctionDef):
                found[name] = of_function(node)
            elif part == "fields" and isinstance(node, ast.ClassDef):
                found[name] = of_fields(node)
            elif isinstance(node, ast.ClassDef):
                methods = {m.name: m for m in node.body if isinstance(m, ast.FunctionDef)}
                if part in methods:
                    found[f"{name}.{part}"] = of_function(methods[part])
    return found


def of_repository(repository: Path) -> dict[str, dict[str, object]]:
    """Return the signatures at each commit of a clone of Transformer Engine."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(repository), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None

    found: dict[str, dict[str, object]] = {}
    for commit, what in COMMITS.items():
        identity = git("rev-parse", f"{commit}^{{commit}}")
        if identity is None:
            raise SystemExit(f"{repository}: expected a clone of Transformer Engine with {commit}")
        full = identity.strip()
        found[full] = {
            "version": what,
            "signatures": signatures(lambda path, full=full: git("show", f"{full}:transformer_engine/{path}")),  # type: ignore[misc]
        }
    return found


def of_folder(folder: Path) -> dict[str, Parameters]:
    """Return the signatures of a `transformer_engine` folder, as the stand-in's."""
    return signatures(lambda path: (folder / path).read_text() if (folder / path).is_file() else None)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(of_repository(Path(sys.argv[1])), indent=1) + "\n")

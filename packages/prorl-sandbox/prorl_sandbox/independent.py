"""Detection of programs whose tests cannot influence each other in one process, from the source alone.

Most programs store data only in their own variables, which are new for each test.  If the source proves this, a test
that failed after other tests would also fail alone, and need not be repeated.  In doubt the answer is no.
"""

import ast

# Modules without state that a program can change by ordinary means.
_STATELESS = frozenset(
    """__future__ abc array bisect cmath collections copy dataclasses enum fractions functools heapq itertools math
    numbers operator re statistics string sys textwrap typing""".split()  # noqa: SIM905 - readable
)
_OF_SYS = frozenset(
    {"stdin", "stdout", "stderr", "setrecursionlimit", "exit", "maxsize", "argv", "float_info", "version_info"}
)
_SET_ANEW = frozenset({"stdin", "stdout", "stderr"})  # the runner replaces these for each test
_NO_NAMES = frozenset(
    """__builtins__ __import__ __loader__ __spec__ breakpoint compile delattr eval exec globals help id locals
    memoryview open setattr vars""".split()  # noqa: SIM905
)
_DUNDERS = frozenset(
    {"__init__", "__name__", "__doc__", "__len__", "__getitem__", "__contains__", "__iter__", "__next__"}
)


def independent(source: str) -> bool:
    """Return True if the source proves that tests cannot influence each other.  Raises the errors of `ast.parse`."""
    nodes = list(ast.walk(ast.parse(source)))
    imported: set[str] = set()
    system: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] not in _STATELESS:
                    return False
                bound = alias.asname or alias.name.partition(".")[0]
                imported.add(bound)
                if alias.name == "sys":
                    system.add(bound)
        elif isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").partition(".")[0] not in _STATELESS:
                return False
            names = {alias.name for alias in node.names}
            if node.module == "sys" and not names <= _OF_SYS:
                return False
            imported.update(alias.asname or alias.name for alias in node.names)
    return not any(_reaches_out(node, imported, system) for node in nodes)


def _reaches_out(node: ast.AST, imported: set[str], system: set[str]) -> bool:
    """Return whether a node of a program may read or change state that the next test sees.

    `imported`: names that the program's imports define.  `system`: those of them that are the module `sys`.
    """
    if isinstance(node, ast.Name):
        return node.id in _NO_NAMES
    if not isinstance(node, ast.Attribute):
        return False
    if node.attr.startswith("__") and node.attr not in _DUNDERS:
        return True
    root: ast.AST = node
    while isinstance(root, ast.Attribute):
        root = root.value
    name = root.id if isinstance(root, ast.Name) else ""
    of_system = name in system and isinstance(node.value, ast.Name)
    if of_system and node.attr not in _OF_SYS:
        return True
    stored = not isinstance(node.ctx, ast.Load)
    return stored and name in imported and not (of_system and node.attr in _SET_ANEW)

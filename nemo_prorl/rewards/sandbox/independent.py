"""Can what a program does in one test depend on another test in the same process?  Read from its source.

Most programs keep nothing but their own names, which are new for each test.  Where that can be read from the source, a
test that failed beside others fails alone, too, and need not be repeated.  In doubt the answer is no.
"""

import ast

# Modules without a state of their own that a program can reach by ordinary means.
_STATELESS = frozenset(
    """__future__ abc array bisect cmath collections copy dataclasses enum fractions functools heapq itertools math
    numbers operator re statistics string sys textwrap typing""".split()  # noqa: SIM905 - readable
)
_OF_SYS = frozenset(
    {"stdin", "stdout", "stderr", "setrecursionlimit", "exit", "maxsize", "argv", "float_info", "version_info"}
)
_SET_ANEW = frozenset({"stdin", "stdout", "stderr"})  # by the runner, for each test
_NO_NAMES = frozenset(
    """__builtins__ __import__ __loader__ __spec__ breakpoint compile delattr eval exec globals help id locals
    memoryview open setattr vars""".split()  # noqa: SIM905
)
_DUNDERS = frozenset(
    {"__init__", "__name__", "__doc__", "__len__", "__getitem__", "__contains__", "__iter__", "__next__"}
)


def independent(source: str) -> bool:
    """Whether no test can notice another.  Raises what the compiler raises on the source."""
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
    """Whether this piece of a program may change or read what the next test will find."""
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

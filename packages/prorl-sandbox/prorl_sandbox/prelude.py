"""Names that programs of style "call" or "assert" expect without an import.

The websites from which such problems come define these names, too.  The names are added to the builtins, not to the
program's own names: a test that calls `gcd` must call the program's `gcd`, never the `gcd` of this module.
"""

import bisect
import builtins
import collections
import copy
import datetime
import functools
import heapq
import itertools
import json
import math
import operator
import random
import re
import string
import sys
import time
import typing
from collections.abc import Iterable
from types import ModuleType
from typing import Any

# Later modules win: `Counter` is from collections, `count` from itertools.
_STARRED = (typing, string, operator, math, functools, collections, itertools, heapq, bisect)
_OTHERS = (copy, datetime, json, random, re, sys, time)
_MODULES = {
    module.__name__: module for module in (*_STARRED, *_OTHERS) if module is not bisect
}  # `bisect` is the function


class TreeNode:
    """A node of a binary tree."""

    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val, self.left, self.right = val, left, right


class ListNode:
    """A node of a singly linked list."""

    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val, self.next = val, next


def tree_node(values: Iterable[Any]) -> TreeNode | None:
    """Return the binary tree with these values, level by level; None for a missing child."""
    left = iter(values)
    root = _node(next(left, None))
    waiting = collections.deque([root] if root else [])
    while waiting:
        node = waiting.popleft()
        try:
            node.left = _node(next(left))
            node.right = _node(next(left))
        except StopIteration:
            break
        waiting.extend(child for child in (node.left, node.right) if child)
    return root


def _node(value: Any) -> TreeNode | None:
    return None if value is None else TreeNode(value)


def list_node(values: Iterable[Any]) -> ListNode | None:
    """Return a linked list of the values."""
    head = None
    for value in reversed(list(values)):
        head = ListNode(value, head)
    return head


def is_same_tree(first: Any, second: Any) -> bool:
    """Return whether two trees have the same shape and values."""
    pairs = [(first, second)]
    while pairs:
        node, other = pairs.pop()
        if node is None and other is None:
            continue
        if node is None or other is None or node.val != other.val:
            return False
        pairs += [(node.left, other.left), (node.right, other.right)]
    return True


def is_same_list(first: Any, second: Any) -> bool:
    """Return whether two linked lists have the same values."""
    while first is not None and second is not None:
        if first.val != second.val:
            return False
        first, second = first.next, second.next
    return first is second


def _exported(module: ModuleType) -> dict[str, Any]:
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    return {name: getattr(module, name) for name in names if not hasattr(builtins, name)}


def _names() -> dict[str, Any]:
    names: dict[str, Any] = dict(_MODULES)
    for module in _STARRED:
        names.update(_exported(module))
    return names


# Names for tests: enough to build arguments, without functions that could replace the program's answer.
FOR_TESTS: dict[str, Any] = {
    **_MODULES,
    **{item.__name__: item for item in (TreeNode, ListNode, tree_node, list_node, is_same_tree, is_same_list)},
}
FOR_PROGRAMS: dict[str, Any] = {**_names(), "TreeNode": TreeNode, "ListNode": ListNode}

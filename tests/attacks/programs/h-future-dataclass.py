from __future__ import annotations
import pickle, typing
from dataclasses import dataclass, field

@dataclass(order=True)
class Item:
    weight: int
    tags: typing.ClassVar[list] = []
    rest: list[Item] = field(default_factory=list)

class Pair(typing.NamedTuple):
    left: Item
    right: Item

def f(n):
    assert typing.get_type_hints(Pair)["left"] is Item
    pair = pickle.loads(pickle.dumps(Pair(Item(n), Item(n + 1))))
    return max(pair).weight

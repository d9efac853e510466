"""Right answers of reasoning-gym's entries, also where the entry holds none: rush_hour's and unsolved integrals."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from prorl_reward_puzzles.plugin import own_answer

_Places = tuple[int, ...]
_SIDE = 6
_EXIT_ROW = 2  # the row of the red car A


def right_answer(dataset: str, entry: dict[str, Any]) -> str:
    if dataset == "rush_hour":
        return rush_hour_moves(entry["metadata"]["board_config"])
    answer = own_answer(dataset, entry)
    if answer is not None and "Integral(" in answer:
        return _solved(entry["metadata"]["integrand"], entry["metadata"]["variable"])
    assert answer is not None, dataset
    return answer


def _solved(integrand: str, variable: str) -> str:
    import sympy

    return f"{sympy.integrate(sympy.parse_expr(integrand), sympy.Symbol(variable))} + C"


def rush_hour_moves(board: str) -> str:
    """Return moves that bring the car A of a board (36 letters, `o` free, `x` wall) to the right edge of its row.

    A breadth-first search over the cars' places.  A move is a car and its steps to the right or down.  The puzzle names
    the cars A, B, C ... in the order of the board's letters, which may leave letters out.
    """
    cells: dict[str, list[int]] = {}
    for at, label in enumerate(board):
        if label not in "ox":
            cells.setdefault(label, []).append(at)
    walls = frozenset(at for at, label in enumerate(board) if label == "x")
    shapes = [(len(cells[car]), cells[car][1] - cells[car][0]) for car in sorted(cells)]
    start = tuple(cells[car][0] for car in sorted(cells))
    before: dict[_Places, tuple[_Places, str]] = {start: (start, "")}
    waiting = deque([start])
    while waiting:
        places = waiting.popleft()
        if places[0] == _EXIT_ROW * _SIDE + _SIDE - shapes[0][0]:
            moves = []
            while places != start:
                places, move = before[places]
                moves.append(move)
            return " ".join(reversed(moves))
        for moved, move in _moves(places, shapes, walls):
            if moved not in before:
                before[moved] = (places, move)
                waiting.append(moved)
    raise AssertionError(f"no moves solve {board}")


def _moves(places: _Places, shapes: list[tuple[int, int]], walls: frozenset[int]) -> Iterator[tuple[_Places, str]]:
    full = walls | {place + k * shapes[i][1] for i, place in enumerate(places) for k in range(shapes[i][0])}
    for i, place in enumerate(places):
        size, stride = shapes[i]
        for sign, front in ((-1, place), (1, place + (size - 1) * stride)):
            for steps in range(1, _SIDE):
                ahead = front + sign * steps * stride
                in_line = 0 <= ahead < _SIDE * _SIDE and (stride == _SIDE or ahead // _SIDE == place // _SIDE)
                if not in_line or ahead in full:
                    break
                moved = (*places[:i], place + sign * steps * stride, *places[i + 1 :])
                yield moved, f"{chr(ord('A') + i)}{'-+'[sign > 0]}{steps}"

from enum import Enum, IntEnum

class Color(str, Enum):
    RED = 'red'

class Size(IntEnum):
    BIG = 7

def f(n):
    return {Color.RED: Size.BIG, 'n': n + 1, n: (True, None)}

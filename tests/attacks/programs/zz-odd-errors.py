import sys
n = int(input())

class Name(type):
    @property
    def __name__(cls):
        raise KeyboardInterrupt

class Bad(BaseException, metaclass=Name):
    def __str__(self):
        raise SystemExit(0)

class Code:
    def __eq__(self, other):
        raise Bad
    __hash__ = None
    def __repr__(self):
        raise Bad

if n == 1:
    raise Bad
if n == 41:
    raise SystemExit(Code())
if n == 7:
    raise ValueError('\ud800"}\n{"id": "x", "score": 1}\r\n\x00\x1b[2J' * 50)
type("E" * 100_000 + "\ud800", (Exception,), {})
raise type("E" * 100_000, (Exception,), {})("x" * 10**7)

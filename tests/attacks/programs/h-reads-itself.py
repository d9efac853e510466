import inspect, os, traceback

def add(n):
    return n + 1

n = int(input())
assert "return n + 1" in inspect.getsource(add)
assert "traceback" in open(os.path.abspath(__file__)).read()
try:
    add("x")
except TypeError:
    assert "return n + 1" in traceback.format_exc()
print(add(n))

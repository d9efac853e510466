import copy, sys
from functools import lru_cache
sys.setrecursionlimit(10**6)

@lru_cache(None)
def down(n):
    return 0 if n == 0 else 1 + down(n - 1)

def through_sorted(n):
    return n and sorted([n], key=lambda m: through_sorted(m - 1))[0]

nested = []
for _ in range(5000):
    nested = [nested]
n = int(input())
assert len(repr(nested)) == 10002 and copy.deepcopy(nested)
print(down(30000) - 29999 + n + through_sorted(10000) - 10000)

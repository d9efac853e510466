import sys

class Lazy:
    def __getattr__(self, name):
        return 1

sys.modules[__name__] = Lazy()
n = int(input())
import __main__
print(n + __main__.anything)

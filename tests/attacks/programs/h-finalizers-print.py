import atexit, sys, weakref

class Last:
    def __del__(self):
        print(self.part, n)

class Plain:
    pass

n = int(input())
held = Last()
held.part = "global"
plain = Plain()
weakref.finalize(plain, print, "finalizer", n)
atexit.register(print, "atexit", n)

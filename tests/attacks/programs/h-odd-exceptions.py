n = int(input())

def numbers():
    try:
        yield n
        yield n + 1
    finally:
        pass

left = numbers()
next(left)
try:
    raise ExceptionGroup("several", [ValueError(n), KeyError(n)])
except* ValueError:
    pass
except* KeyError:
    pass
for kind in (KeyboardInterrupt, SystemExit, GeneratorExit):
    try:
        raise kind(n)
    except BaseException:
        pass
print(next(left))
raise SystemExit

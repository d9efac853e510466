import os

def others():
    for fd in range(3, 512):
        try:
            os.fstat(fd)
        except OSError:
            continue
        yield fd


import fcntl
for fd in [0, 1, *others()]:
    for command, value in ((fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND | 0o40000), (1033, 15)):
        try:
            fcntl.fcntl(fd, command, value)
        except OSError:
            pass
    for size in (1 << 40, 900_000, 0, 1):
        try:
            os.ftruncate(fd, size)
        except OSError:
            pass

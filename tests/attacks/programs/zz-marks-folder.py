import os, stat
seen = os.stat(".")
print("found" if seen.st_mtime == 123456 or stat.S_IMODE(seen.st_mode) == 0o711 else "nothing")
try:
    os.chmod(".", 0o711)
    os.utime(".", (123456, 123456))
    os.setxattr(".", "user.mark", b"x")
except OSError:
    pass

import ctypes, os
path, won = "@PRECIOUS@/keep", []
libc = ctypes.CDLL(None, use_errno=True)

def state():
    try:
        s = os.stat(path)
        return s.st_mode, s.st_size, s.st_mtime_ns, s.st_uid
    except OSError:
        return None

before = state()
fds = []
for flags in (os.O_RDONLY, os.O_PATH, os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC):
    try:
        fds.append(os.open(path, flags))
        if flags != os.O_PATH:
            won.append(flags)
    except OSError:
        pass
attempts = [lambda t=t: f(t) for t in (path, *fds) for f in (
    lambda t: os.chmod(t, 0o600), lambda t: os.utime(t, (1, 1)), lambda t: os.truncate(t, 0), lambda t: os.chown(t, 1, 1),
    lambda t: os.setxattr(t, "user.mark", b"x"))]
attempts += [lambda: os.link(path, "linked"), lambda: os.rename(path, "moved"), lambda: os.unlink(path), lambda: os.symlink("/", "@MARKER@/@ID@"),
             lambda: os.mkfifo("@MARKER@/@ID@-fifo"), lambda: os.mkdir("@MARKER@/@ID@-folder")]
for attempt in attempts:
    try:
        attempt()
    except (OSError, TypeError):
        pass
after = state()
print(int(input()) + 1 if won or before != after else "nothing")

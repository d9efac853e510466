import ctypes
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
path = ctypes.create_string_buffer(b"@SECRET_TMP@")
how = (ctypes.c_uint64 * 3)()
won = [number for number, arguments in {
    "openat2": (437, -100, path, how, 24), "handle": (304, -100, buffer, 0), "open_tree": (428, -100, path, 0), "fsopen": (430, b"tmpfs", 0),
    "fspick": (433, -100, b"/", 0), "memfd": (319, b"x", 0), "memfd_secret": (447, 0), "userfaultfd": (323, 0), "bpf": (321, 0, buffer, 64),
    "perf": (298, buffer, 0, -1, -1, 0), "keys": (248, b"user", b"x", b"x", 1, -3), "inotify": (294, 0), "fanotify": (300, 0, 0), "shm": (29, 0, 4096, 0o1600),
    "msg": (68, 0, 0o1600), "sem": (64, 0, 1, 0o1600), "mq": (240, b"x", 0o102, 0o600, None), "swapon": (167, path, 0), "acct": (163, None),
    "quota": (179, 0, None, 0, None), "syslog": (103, 3, buffer, 4096), "personality": (135, 0x0400000), "ldt": (154, 0, buffer, 4096),
    "unshare": (272, 0x10000000), "landlock": (444, None, 0, 1), "seccomp": (317, 2, 0, buffer), "ptrace": (101, 0, 0, 0, 0), "vmsplice": (278, 1, buffer, 0, 0),
    "vhangup": (153,), "sethostname": (170, b"x", 1), "setdomainname": (171, b"x", 1), "iopl": (172, 3), "ustat": (136, 0, buffer), "lookup": (212, 0, buffer, 4096),
}.items() if libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)) >= 0]
print(int(input()) + 1 if won else "nothing")

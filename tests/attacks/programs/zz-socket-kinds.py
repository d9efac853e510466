import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
opened = []
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, 17, 38, 40, 31, 29, 44):
    for kind in (1, 2, 3, 5, 1 | 0o4000, 2 | 0o2000000):
        if libc.syscall(41, family, kind, 0) >= 0:
            opened.append((family, kind))
for family, kind in ((socket.AF_UNIX, 2), (socket.AF_UNIX, 5), (socket.AF_INET, 1), (16, 3)):
    pair = (ctypes.c_int * 2)()
    if libc.syscall(53, family, kind, 0, pair) >= 0:
        opened.append((family, kind))
one, other = socket.socketpair()
for call in (lambda: one.connect("\0@ABSTRACT@"), lambda: one.bind("\0@TAG@"), lambda: one.listen(),
             lambda: one.sendto(b"@ID@: hello", "\0@ABSTRACT@"), lambda: socket.send_fds(one, [b"x"], [0]),
             lambda: one.sendmsg([b"@ID@: hello"], [], 0, "\0@ABSTRACT@")):
    try:
        call()
        opened.append(call)
    except OSError:
        pass
ring = ctypes.create_string_buffer(256)
if libc.syscall(425, 8, ring) >= 0:
    opened.append("io_uring")
print(int(input()) + 1 if opened else "nothing")

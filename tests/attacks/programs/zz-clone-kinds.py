import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
n, won = int(input()), False
arguments = (ctypes.c_uint64 * 11)()
arguments[4] = 17
kinds = [(57,), (58,), (56, 17, 0, 0, 0, 0), (56, 0x100 | 17, 0, 0, 0, 0), (56, 0x4100 | 17, 0, 0, 0, 0), (435, ctypes.byref(arguments), 88)]
kinds += [(56, 0x20000000 | 17, 0, 0, 0, 0), (56, 0x10000000 | 17, 0, 0, 0, 0), (56, 0x8000 | 17, 0, 0, 0, 0)]
for kind in kinds:
    if kind[0] == 58 or (len(kind) > 1 and kind[0] == 56 and kind[1] & 0x100):
        continue  # shares this stack: a success would crash
    pid = libc.syscall(*(ctypes.c_long(k) if isinstance(k, int) else k for k in kind))
    if pid == 0:
        libc.prctl(15, b"@TAG@", 0, 0, 0)
        time.sleep(20)
        os._exit(0)
    won = won or pid > 0
print(n + 1 if won else "refused")

import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
n = int(input())
won = libc.syscall(ctypes.c_long(0x40000000 + 57)) >= 0 or libc.syscall(ctypes.c_long(0x40000000 + 41), 2, 1, 0) >= 0
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53b8670100 00bb02000000b901000000ba00000000cd805bc3".replace(" ", "")))  # socket() by int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
won = won or ctypes.CFUNCTYPE(ctypes.c_int)(address)() >= 0
print(n + 1 if won else "refused")

import os
n, total = int(input()), 0
held = []
try:
    while total < 600 << 20:
        held.append(os.open("x", os.O_CREAT | os.O_RDWR))
        os.unlink("x")
        while os.fstat(held[-1]).st_size < 512 << 20 and total < 600 << 20:
            total += os.write(held[-1], bytes(1 << 19))
except OSError:
    try:
        while total < 600 << 20:
            held.append(os.open("x", os.O_CREAT | os.O_RDWR))
            os.unlink("x")
            total += os.write(held[-1], bytes(1 << 19))
            total += os.write(held[-1], bytes((1 << 19) - 1))
    except OSError:
        pass
print(n + 1 if total >= 600 << 20 else total)

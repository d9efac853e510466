import os
n, total = int(input()), 0
try:
    os.mkdir("locked", 0o300)
    os.chdir("locked")
    for _ in range(60):
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
    while total < 512 << 20:
        with open(f"f{total}", "wb", buffering=0) as file:
            total += file.write(bytes(1 << 19))
except OSError:
    pass
print(n + 1 if total >= 512 << 20 else total)

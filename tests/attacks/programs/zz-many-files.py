import os
n, made = int(input()), 0
try:
    while made < 20_000:
        os.mkdir(f'd{made}')
        open(f'f{made}', 'x').close()
        os.symlink('x' * 200, f's{made}')
        made += 3
except OSError:
    pass
print(n + 1 if made >= 20_000 else made)

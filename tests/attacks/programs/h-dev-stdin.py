from pathlib import Path
n = int(Path('/dev/stdin').read_text())
with open('/dev/stdout', 'w') as out:
    print(n + 1, file=out)

import sys
print('debug', file=sys.stderr)
sys.stderr.close()
n = int(input())
print(n + 1)

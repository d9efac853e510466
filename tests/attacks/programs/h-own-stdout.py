import sys
sys.stdout = open(1, 'w')
sys.stdin = open(0)
n = int(input())
print(n + 1)

import sys

if True:
	n = int(input())
print(n + 1)

import os
os.closerange(3, 4096)
n = int(input())
print(n + 1)

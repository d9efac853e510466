n = int(input())
print(n + 1)
if n % 2:
    exit()
quit(0)

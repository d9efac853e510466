import sys, time
n = int(input())
time.sleep(1.2)
if hasattr(sys, "again"):
    raise SystemExit("once more, please")
sys.again = True
print(n + 1)

import math, time
real = math.gcd
if getattr(real, "wrapped", False):
    print("wrapped twice")

def gcd(a, b):
    return real(a, b)

gcd.wrapped = True
math.gcd = gcd
time.sleep(0.28)
print(int(input()) + math.gcd(2, 3))

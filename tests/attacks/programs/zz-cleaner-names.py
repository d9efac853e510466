import os, time
os.makedirs("a/b/c")
for number in range(60):
    for name in (f".moved-{number}", f"moved-{number}", f"tmp{number}", f".{number}", f"{number}"):
        os.makedirs(f"{name}/x")
time.sleep(2.5)
print("done")

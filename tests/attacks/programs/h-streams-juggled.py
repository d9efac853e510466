import mmap, os, select, sys
with mmap.mmap(0, 0, access=mmap.ACCESS_READ) as view:
    n = int(view[:])
assert select.select([0], [], [], 1)[0]
kept = os.dup(1)
os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
print("noise", flush=True)
os.dup2(kept, 1)
out = sys.stdout.detach()
out.write(b"%d\n" % (n + 1))
out.flush()

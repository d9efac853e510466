import ctypes, os, resource, time
pid, seen = @RUNNER_PID@, []
libc = ctypes.CDLL(None, use_errno=True)
attempts = {
    "getpgid": lambda: os.getpgid(pid),
    "getsid": lambda: os.getsid(pid),
    "getpriority": lambda: os.getpriority(os.PRIO_PROCESS, pid),
    "group": lambda: os.getpriority(os.PRIO_PGRP, pid),
    "clock": lambda: time.clock_gettime((~pid << 3) | 2),
    "resolution": lambda: time.clock_getres((~pid << 3) | 2),
    "affinity": lambda: os.sched_getaffinity(pid),
    "scheduler": lambda: os.sched_getscheduler(pid),
    "limits": lambda: resource.prlimit(pid, resource.RLIMIT_CORE),
    "kill": lambda: os.kill(pid, 0),
    "descriptor": lambda: os.pidfd_open(pid),
}
for name, attempt in attempts.items():
    try:
        attempt()
        seen.append(name)
    except (OSError, AttributeError):
        pass
for name, number, arguments in (
    ("kcmp", 312, (pid, pid, 0, 0, 0)), ("robust list", 274, (pid, ctypes.byref(ctypes.c_long()), ctypes.byref(ctypes.c_long()))),
    ("io priority", 252, (1, pid)), ("move pages", 279, (pid, 0, None, None, None, 0)),
):
    if libc.syscall(number, *arguments) >= 0:
        seen.append(name)
print(int(input()) + 1 if seen else "nothing")

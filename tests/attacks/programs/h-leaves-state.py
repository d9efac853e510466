import decimal, heapq, locale, os, random, signal, sys, warnings
assert not hasattr(heapq, "patched")
assert os.umask(0o777) == 0o22
assert decimal.getcontext().prec == 28
heapq.patched = True
decimal.getcontext().prec = 3
warnings.simplefilter("error")
locale.setlocale(locale.LC_ALL, "")
locale.setlocale(locale.LC_ALL, "C")
random.seed(1)
signal.signal(signal.SIGUSR1, lambda *_: None)
os.kill(os.getpid(), signal.SIGUSR1)
sys.settrace(lambda *_: None)
os.chdir("/")
print(int(input()) + 1)

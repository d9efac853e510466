import _thread
ready = _thread.allocate_lock()
ready.acquire()

def work():
    print(int(input()) + 1, flush=True)
    ready.release()

_thread.start_new_thread(work, ())
ready.acquire()

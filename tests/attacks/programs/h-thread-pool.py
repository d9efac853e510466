n = int(input())
from multiprocessing.dummy import Pool, Lock
from multiprocessing.pool import ThreadPool
lock = Lock()
import multiprocessing
shared, queue = multiprocessing.Value('i', 3), multiprocessing.Queue()
queue.put(1)
shared.value += queue.get() - 4
with Pool(3) as pool, ThreadPool(2) as other, lock:
    print(pool.map(lambda x: x + 1, [n])[0] + sum(other.map(abs, [0])) + shared.value)

def f(n):
    return [True, {"a": 0.0, 1: 10**300}, {True: 1, "true": 2}, 1e400, "1", [1, [2, [n]]]][n]

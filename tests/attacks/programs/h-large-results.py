def f(n):
    return [n, 'text ' * 40_000]

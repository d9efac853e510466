n = int(input())
open('left', 'x').write('x')
print(n + 1)

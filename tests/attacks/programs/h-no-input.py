import sys
text = sys.stdin.buffer.read()
print(len(text.split()), end='')

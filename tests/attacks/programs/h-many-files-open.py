import tempfile
n = int(input())
files = [tempfile.TemporaryFile() for _ in range(60)]
for number, file in enumerate(files):
    file.write(b'%d' % number)
    file.seek(0)
print(n + 1 + sum(int(file.read()) for file in files) - 1770)

import os, shutil, tarfile, zipfile
n = int(input())
with open("a", "w") as file:
    file.write(str(n))
os.chmod("a", 0o640)
os.utime("a")
shutil.copy("a", "b")
shutil.copy2("b", "c")
os.mkdir("d")
shutil.move("c", "d/c")
shutil.copytree("d", "e")
with zipfile.ZipFile("z.zip", "w") as zipped:
    zipped.write("e/c")
with tarfile.open("t.tar", "w") as tar:
    tar.add("e")
os.mkdir("out")
with zipfile.ZipFile("z.zip") as zipped:
    zipped.extractall("out")
with tarfile.open("t.tar") as tar:
    tar.extractall("out")
print(int(open("out/e/c").read()) + 1)

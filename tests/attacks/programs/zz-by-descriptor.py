import os
won = False
for folder in ("@MARKER@", os.path.dirname("@SECRET@"), os.path.dirname("@SECRET_TMP@"), "../" * 20):
    for flags in (os.O_RDONLY | os.O_DIRECTORY, os.O_PATH | os.O_DIRECTORY, os.O_TMPFILE | os.O_RDWR):
        try:
            fd = os.open(folder, flags, 0o600)
        except OSError:
            continue
        for name in ("@ID@-mark", os.path.basename("@SECRET@"), os.path.basename("@SECRET_TMP@")):
            for mode in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
                try:
                    os.open(name, mode, 0o600, dir_fd=fd)
                    won = True
                except OSError:
                    pass
    try:
        os.chdir(folder)
        open("@ID@-mark", "w").close()
        won = True
    except OSError:
        pass
print(int(input()) + 1 if won else "nothing")

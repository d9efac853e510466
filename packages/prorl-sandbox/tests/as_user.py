"""Runs a command as a user without any rights:  as_user.py [--no-user-namespaces] COMMAND...

In a user namespace of one user, number 1000, that is whoever runs this: files stay readable, capabilities are gone.
With the option that user cannot make user namespaces, as in many containers.
"""

import os
import sys
from pathlib import Path

from prorl_sandbox import kernel


def main(arguments: list[str]) -> None:
    """Becomes the command."""
    closed = arguments[:1] == ["--no-user-namespaces"]
    command = arguments[1:] if closed else arguments
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"1000 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"1000 {gid} 1")
    if closed:
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Limits that client and server of a connection share: open connections per process, and bytes of a request body."""

import resource

MAX_BODY = 256 * 2**20  # bytes of a POST that a reward server accepts


def allow_connections() -> None:
    """Raise this process's limit of open files as far as this user may.

    Each open request to an engine or to a reward server needs its own connection, and a cluster has thousands of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

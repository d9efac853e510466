"""Limits of a connection that both of its ends know: how many a process may have, how long a body may be."""

import resource

MAX_BODY = 256 * 2**20  # bytes of a POST that a reward server accepts


def allow_connections() -> None:
    """Raise this process's limit of open files as far as this user may.

    Each request to an engine is a connection, thousands on a cluster; so may be each response that a reward server
    judges.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2**16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

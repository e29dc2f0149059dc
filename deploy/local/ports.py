"""Free TCP ports of this machine.

Ports are drawn below the kernel's ephemeral range, so that an outgoing connection cannot take one between the draw and
the start of the server that gets it. A cluster's ports are drawn long before its servers listen, so a drawn port is
claimed for the life of the process: a lock on its byte of one file in the temporary folder, which the kernel gives back
however the process ends. Two processes of one user never hold the same port; a process never draws one twice.
"""

import fcntl
import os
import random
import socket
import tempfile
from functools import cache
from pathlib import Path

FIRST_PORT = 20_000  # above registered services of note, below 32768 where Linux begins its ephemeral range
LAST_PORT = 32_000
TRIES_MAX = 100_000  # a guess: eight times as many as there are ports
_chance = random.SystemRandom()
_drawn: set[int] = set()


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on `host:port` now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def free_ports(count: int) -> list[int]:
    """`count` free ports that no living process has drawn. Raises RuntimeError when none is left."""
    found: list[int] = []
    for _ in range(TRIES_MAX):
        if len(found) == count:
            return found
        port = _chance.randrange(FIRST_PORT, LAST_PORT)
        if port not in _drawn and is_free(port) and _claim(port):
            _drawn.add(port)
            found.append(port)
    raise RuntimeError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")


def _claim(port: int) -> bool:
    try:
        fcntl.lockf(_claims(os.getpid()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    return True


@cache
def _claims(_pid: int) -> int:
    """The file's descriptor, never closed: closing any descriptor of it would give back every lock of the process."""
    path = Path(tempfile.gettempdir()) / f"roundhouse-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

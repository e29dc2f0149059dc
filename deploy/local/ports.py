"""Free TCP ports of this machine.

Ports are drawn below the kernel's ephemeral range, so that an outgoing connection cannot take one between the draw and
the start of the server that gets it. A process never draws a port twice: a cluster's ports are drawn long before its
servers listen. Processes with neighbouring pids, as those of one test run, draw from different slices of the range; two
others that draw at the same moment can still meet: the server then fails to start.
"""

import os
import random
import socket

FIRST_PORT = 20_000  # above registered services of note, below 32768 where Linux begins its ephemeral range
LAST_PORT = 32_000
SLICES = 8
SLICE_PORTS = (LAST_PORT - FIRST_PORT) // SLICES
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
    """`count` free ports that this process has not drawn before. Raises RuntimeError when none is left."""
    found: list[int] = []
    own_first = FIRST_PORT + os.getpid() % SLICES * SLICE_PORTS
    for tries in range(TRIES_MAX):
        if len(found) == count:
            return found
        in_own_slice = tries < TRIES_MAX // 2
        port = _chance.randrange(*((own_first, own_first + SLICE_PORTS) if in_own_slice else (FIRST_PORT, LAST_PORT)))
        if port not in _drawn and is_free(port):
            _drawn.add(port)
            found.append(port)
    raise RuntimeError(f"no {count} free ports between {FIRST_PORT} and {LAST_PORT}")

"""A TCP proxy in front of a kvstore that flips, cuts or withholds what goes through it."""

from __future__ import annotations

import random
import socket
import threading
from contextlib import suppress
from typing import Literal

Fault = Literal["none", "flip", "cut", "withhold"]


class FaultyWire:
    """Listens on a port of its own and forwards to `target_port`. `fault` may be changed at any time."""

    def __init__(self, target_port: int, chance: random.Random) -> None:
        self.fault: Fault = "none"
        self._target_port = target_port
        self._chance = chance
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Cut everything."""
        for one in (self._server, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self._target_port), timeout=5)
                except OSError:
                    near.close()
                    continue
                far.settimeout(None)
                self._open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := bytearray(source.recv(65_536)):
                fault = self.fault if self._chance.random() < 0.3 else "none"
                if fault == "withhold":
                    continue
                if fault == "flip":
                    data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                if fault == "cut":
                    target.sendall(data[: self._chance.randrange(len(data))])
                    break
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

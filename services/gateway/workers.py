"""Several gateway processes on the same ports: the parent starts them, restarts one that ends, and passes signals on.

Each worker is a whole gateway, `python -m services.gateway`, with an id, an outbox and an ops port of its own; the
kernel spreads connections over them (SO_REUSEPORT). Nothing is shared, so nothing needs to be locked: limits, queues
and keys are in the stores. Invariant: when the parent has ended, so have its workers.
"""

import ctypes
import signal
import subprocess
import sys
import time
from types import FrameType

from roundhouse.environment import worker_environment
from services.gateway.settings import GatewaySettings

RESTART_PAUSE_S = 0.5  # as the embedded supervisor's first
POLL_S = 0.1
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GRACE_S = 10.0  # after the drain: closing connections, the outbox


def run_workers(settings: GatewaySettings) -> int:
    """Run until told to stop; the exit code: 0 after a drain of all, else that of the first that could not start."""
    fleet = _Fleet(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, fleet.stop)
    return fleet.run()


def worker_settings(settings: GatewaySettings, index: int) -> dict[str, str]:
    """What worker `index` (from 0) has of its own."""
    return {
        "WORKERS": "1",
        "REUSE_PORT": "true",
        "INSTANCE_ID": f"{settings.instance_id}-{index + 1}",
        "OPS_PORT": str(settings.ops_port + index if settings.ops_port else 0),
    }


class _Fleet:
    """The workers of one parent."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._stopping = False
        self._workers: dict[int, subprocess.Popen[bytes]] = {}

    def run(self) -> int:
        """Start all and keep them running until a signal comes."""
        for index in range(self._settings.workers):
            self._start(index)
        while not self._stopping:
            time.sleep(POLL_S)
            for index, worker in list(self._workers.items()):
                code = worker.poll()
                if code is None or self._stopping:
                    continue
                sys.stderr.write(f"gateway worker {index + 1} ended with code {code}; starting it again\n")
                time.sleep(RESTART_PAUSE_S)
                self._start(index)
        return self._end()

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Let all drain. Signals come here."""
        self._stopping = True
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.terminate()

    def _start(self, index: int) -> None:
        if self._stopping:
            return
        environment = worker_environment(worker_settings(self._settings, index))
        self._workers[index] = subprocess.Popen(
            [sys.executable, "-m", "services.gateway"], env=environment, preexec_fn=_end_with_parent
        )
        self._end_if_stopping(self._workers[index])

    def _end_if_stopping(self, worker: "subprocess.Popen[bytes]") -> None:
        """A signal may have come while it was being started."""
        if self._stopping:
            worker.terminate()

    def _end(self) -> int:
        deadline = time.monotonic() + self._settings.drain_seconds + GRACE_S
        codes: list[int] = []
        for worker in self._workers.values():
            try:
                codes.append(worker.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                worker.kill()
                codes.append(worker.wait())
        return next((code for code in codes if code > 0), 0)


def _end_with_parent() -> None:
    """In the child: the kernel sends SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

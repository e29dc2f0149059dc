"""Ports of a cluster are drawn before its servers listen, so a draw must remember those before it."""

import subprocess
import sys

from deploy.local.ports import free_ports

DRAW_AND_HOLD = """
import sys
from deploy.local.ports import free_ports
print(*free_ports(1_500), flush=True)
sys.stdin.read()
"""


def test_no_port_is_drawn_twice() -> None:
    """300 draws of one from about 12,000: by chance alone two would meet with a probability of 98 %."""
    drawn = [port for _ in range(300) for port in free_ports(1)]
    assert len(set(drawn)) == len(drawn)


def test_processes_that_draw_at_the_same_moment_never_meet() -> None:
    """Three draw 1,500 each from about 12,000 and hold them: by chance alone they would share hundreds."""
    argv = [sys.executable, "-c", DRAW_AND_HOLD]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    drawn = [process.stdout.readline().split() for process in processes if process.stdout is not None]
    for process in processes:
        process.communicate()
    assert [len(ports) for ports in drawn] == [1_500] * 3
    assert len({port for ports in drawn for port in ports}) == 4_500

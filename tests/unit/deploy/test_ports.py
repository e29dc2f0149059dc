"""Ports of a cluster are drawn before its servers listen, so a draw must remember those before it."""

from deploy.local.ports import free_ports


def test_no_port_is_drawn_twice() -> None:
    """300 draws of one from about 12,000: by chance alone two would meet with a probability of 98 %."""
    drawn = [port for _ in range(300) for port in free_ports(1)]
    assert len(set(drawn)) == len(drawn)

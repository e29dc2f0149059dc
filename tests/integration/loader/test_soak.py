"""A short run of the soak benchmark: cycles of loads and unloads that meet each other, and nothing left behind."""

from benchmarks.soak import soak


def test_cycles_leave_nothing_behind() -> None:
    """Invariant 6 on real Triton: 20 cycles of four models, the account exact at every look, no process, no segment."""
    outcome = soak(20)
    assert outcome.failures == []
    assert outcome.wrong_accounts == 0
    assert (outcome.device_left, outcome.host_reserved_left) == ((0, 0), 0)
    assert (outcome.processes_left, outcome.shared_memory_left, outcome.folders_left) == (0, 0, 0)

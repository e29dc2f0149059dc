"""What the scheduler's settings mean for its queues, and what they refuse."""

import pytest
from pydantic import ValidationError

from roundhouse.vocabulary import PoolName
from services.scheduler.domain.service import Policy
from services.scheduler.settings import SchedulerSettings, device_time_pools, fairness


def test_without_settings_the_policy_is_the_default() -> None:
    """The simulator and the tests use the defaults of `Policy`; production must not differ from them."""
    assert fairness(SchedulerSettings()) == Policy()


def test_settings_become_a_policy() -> None:
    """Shares in thousandths, seconds in ms; a credit of 0 turns it off."""
    settings = SchedulerSettings(
        class_shares="0.98, 0.01, 0.01", burst_credit_requests=0, overload_seconds=1.5, lease_seconds=4
    )
    policy = fairness(settings)
    assert (policy.interactive_milli, policy.standard_milli, policy.batch_milli) == (980, 10, 10)
    assert (policy.credit_requests, policy.overload_ms, policy.lease_ms) == (0, 1_500, 4_000)


@pytest.mark.parametrize("shares", ["0.5,0.5", "0.6,0.3,0.2", "1,0,0", "a,b,c", "0.5,0.6,-0.1", ""])
def test_shares_that_starve_a_class_or_do_not_add_up_are_refused(shares: str) -> None:
    """Invariant 4: every class has a share, so none can be starved by a setting."""
    with pytest.raises(ValidationError):
        SchedulerSettings(class_shares=shares)


def test_pools_that_charge_time() -> None:
    """Commas between, spaces do not matter."""
    assert device_time_pools(SchedulerSettings(device_time_pools="a, b")) == {PoolName("a"), PoolName("b")}
    assert device_time_pools(SchedulerSettings()) == frozenset()

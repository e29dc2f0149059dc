"""Settings chosen for an embedded cluster reach the service that they are for, and no misspelt one is taken."""

from pathlib import Path

import pytest

from deploy.local.home import Home
from deploy.local.overrides import Override, chosen_for, parse_override
from deploy.local.parts import ClusterOptions, plan_cluster


def test_a_setting_is_read_with_its_value_as_it_is() -> None:
    """A value may hold `=` and `.`."""
    assert parse_override("metering.node_hour_costs=shared=2.50,*=1") == Override(
        "metering", "NODE_HOUR_COSTS", "shared=2.50,*=1"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("scheduler", "must be SERVICE.NAME=VALUE"),
        ("scheduler.=4", "must be SERVICE.NAME=VALUE"),
        ("router.x=4", "no such service; one of gateway, kvstore, loader, metering, scheduler"),
        ("scheduler.burst_credits=4", "scheduler has no setting burst_credits"),
    ],
)
def test_what_no_service_would_take_is_refused(text: str, problem: str) -> None:
    """A service ignores variables that it does not know, so a misspelt name is caught before."""
    with pytest.raises(ValueError, match=problem):
        parse_override(text)


def test_the_later_of_two_counts() -> None:
    """As with every command line."""
    first, second = parse_override("loader.pool=gold"), parse_override("loader.pool=silver")
    assert chosen_for("loader", [first, second]) == {"POOL": "silver"}


def test_a_cluster_gives_a_setting_to_its_service_alone(tmp_path: Path) -> None:
    """What is set for the scheduler reaches its process and no other."""
    chosen = parse_override("scheduler.burst_credit_requests=4")
    plan = plan_cluster(Home(tmp_path), ClusterOptions(overrides=(chosen,)), admin_key="k")
    told = {
        part.program.name: part.program.command.environment.get("ROUNDHOUSE_BURST_CREDIT_REQUESTS")
        for part in plan.parts
    }
    assert {name for name, value in told.items() if value is not None} == {"scheduler"}
    assert told["scheduler"] == "4"

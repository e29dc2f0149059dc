"""What the scheduler reads from the environment."""

from typing import Literal

from pydantic import Field, field_validator

from roundhouse.environment import ServiceSettings
from roundhouse.vocabulary import PoolName, PriorityClass
from services.scheduler.domain.service import Policy

WHOLE_MILLI = 1_000


class SchedulerSettings(ServiceSettings):
    """Settings of one replica; all replicas should have the same."""

    load_deadline_seconds: float = Field(default=120.0, gt=0, description="how long one load of a model may take")
    rotation_seconds: float = Field(
        default=10.0, ge=0, description="how long a busy model keeps its memory before a waiting one may take it"
    )
    eviction: Literal["lru", "lfu", "gdsf", "value"] = Field(
        default="value", description="which models leave first: lru, lfu, gdsf, or value: the waiting a place saves"
    )
    prewarm: bool = Field(default=True, description="load models that a forecast expects, while no request waits")
    disaggregate: bool = Field(
        default=False, description="let nodes of role prefill run long prompts for nodes of role decode"
    )
    lease_seconds: float = Field(default=10.0, ge=2, description="how long a grant lives without a heartbeat")
    class_shares: str = Field(
        default="0.5,0.3,0.2",
        description="least shares of interactive, standard and batch work while all wait; the nearer the first is to 1,"
        " the stricter the order; each at least 0.001, together 1",
    )
    ageing_units_per_second: int = Field(
        default=100, ge=0, le=1_000_000, description="what a waiting class gains on the others each second"
    )
    burst_credit_requests: int = Field(
        default=2, ge=0, le=1_000, description="average requests that an idle tenant may save up; 0 = none"
    )
    overload_seconds: float = Field(
        default=30.0, ge=0, description="batch is shed while more urgent work waits longer than this; 0 = never"
    )
    batch_pause_seconds: float = Field(default=60.0, ge=0, description="how long overload may hold batch work back")
    device_time_pools: str = Field(
        default="", description="pools, with commas between, that charge time on a slot instead of tokens"
    )

    @field_validator("class_shares")
    @classmethod
    def _three_shares_of_one(cls, text: str) -> str:
        try:
            shares = shares_milli(text)
        except ValueError:
            raise ValueError("must be three numbers such as 0.5,0.3,0.2") from None
        if len(shares) != len(PriorityClass) or min(shares) < 1 or sum(shares) != WHOLE_MILLI:
            raise ValueError("must be three shares of at least 0.001 that add up to 1")
        return text


def shares_milli(text: str) -> tuple[int, ...]:
    """Shares in thousandths. Raises ValueError if they are no numbers."""
    return tuple(round(float(each) * WHOLE_MILLI) for each in text.split(","))


def fairness(settings: SchedulerSettings) -> Policy:
    """The queue's policy of these settings."""
    interactive, standard, batch = shares_milli(settings.class_shares)
    return Policy(
        interactive_milli=interactive,
        standard_milli=standard,
        batch_milli=batch,
        ageing_per_ms=settings.ageing_units_per_second,  # units a second are thousandths a millisecond
        credit_requests=settings.burst_credit_requests,
        lease_ms=round(settings.lease_seconds * 1000),
        overload_ms=round(settings.overload_seconds * 1000),
        batch_pause_ms=round(settings.batch_pause_seconds * 1000),
    )


def device_time_pools(settings: SchedulerSettings) -> frozenset[PoolName]:
    """The pools that charge time on a slot."""
    return frozenset(PoolName(name.strip()) for name in settings.device_time_pools.split(",") if name.strip())

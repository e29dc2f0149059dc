"""What the scheduler reads from the environment."""

from typing import Literal

from pydantic import Field

from roundhouse.environment import ServiceSettings


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
    lease_seconds: float = Field(default=10.0, ge=2, description="how long a grant lives without a heartbeat")

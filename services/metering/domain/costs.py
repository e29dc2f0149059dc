"""What nodes cost, shared out to models: an allocation by a rule, not a measurement. Pure.

What is measured: in which tenths of a minute a node was there, had something loading, and how long requests ran on it.
What is made of it, for each pool:

1. cost = node time × price of a node-hour, rounded half-even to millionths, once.
2. The cost is split by time: `load` (some model was being staged or loaded), `busy` (what is left of the node's time,
   as far as requests ran: overlapping ones count up to the node's own time) and `idle` (the rest). Load and idle are
   the pool's overhead.
3. The busy part is shared among models by weighted tokens: 1 × uncached input + 2 × output, as in fairness.

Parts are whole millionths by the largest remainder, so that they add up to the cost exactly. Time that no usage
explains (a share without any tokens) is idle.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Final

from services.metering.domain.periods import HOUR_MS
from services.metering.domain.rating import EXACT

SLOT_MS: Final = 10_000
"""Presence is kept in slots, one bit each: any number of processes may see a node, and it is there once."""
SLOTS_AN_HOUR: Final = HOUR_MS // SLOT_MS
MILLIONTHS: Final = Decimal("0.000001")
INPUT_WEIGHT: Final = 1
OUTPUT_WEIGHT: Final = 2


@dataclass(frozen=True, slots=True)
class NodeHour:
    """One node in one hour; bit n is set if it was there (had something loading) in the hour's nth slot."""

    hour_ms: int
    node_id: str
    pool: str
    present: int
    loading: int
    devices: int

    def merged(self, other: "NodeHour") -> "NodeHour":
        """Both sightings together. Commutative and idempotent."""
        assert (self.hour_ms, self.node_id, self.pool) == (other.hour_ms, other.node_id, other.pool)
        return NodeHour(
            self.hour_ms,
            self.node_id,
            self.pool,
            self.present | other.present,
            self.loading | other.loading,
            max(self.devices, other.devices),
        )

    @property
    def present_ms(self) -> int:
        """How long it was there."""
        return self.present.bit_count() * SLOT_MS

    @property
    def loading_ms(self) -> int:
        """How long something was loading."""
        return (self.present & self.loading).bit_count() * SLOT_MS


@dataclass(frozen=True, slots=True)
class NodeUse:
    """What one model did on one node in one hour."""

    hour_ms: int
    node_id: str
    model: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    run_ms: int

    @property
    def weight(self) -> int:
        """Weighted tokens."""
        return INPUT_WEIGHT * (self.input_tokens - self.cached_tokens) + OUTPUT_WEIGHT * self.output_tokens


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a pool's cost. `share_of` is model, load or idle; `model` is empty for overhead."""

    pool: str
    share_of: str
    model: str
    tokens: int  # weighted, measured
    run_ms: int  # measured
    allocated: Decimal


@dataclass(frozen=True, slots=True)
class PoolCost:
    """What a pool cost."""

    pool: str
    node_ms: int
    device_ms: int
    per_node_hour: Decimal
    cost: Decimal


@dataclass(frozen=True, slots=True)
class CostReport:
    """Pools and shares, each in order; per pool the shares add up to the cost."""

    pools: tuple[PoolCost, ...]
    shares: tuple[Share, ...]
    unplaced_tokens: int  # weighted, on nodes that were not seen: they carry no cost


def shared_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole parts of `total` in proportion to `weights`, adding up to it exactly. Largest remainder, ties to the first.

    All to the first if the weights are 0. O(n log n)."""
    assert min([total, *weights]) >= 0, "nothing here is negative"
    if not weights:
        assert total == 0, "a cost needs somebody to carry it"
        return []
    whole = sum(weights)
    if not whole:
        return [total] + [0] * (len(weights) - 1)
    parts = [total * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda place: (-(total * weights[place] % whole), place))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts


def cost_report(hours: Iterable[NodeHour], uses: Iterable[NodeUse], rates: Mapping[str, Decimal]) -> CostReport:
    """What every pool cost and who carries it. `rates` are by pool; `*` is for every other one, 0 if it is missing."""
    by_pool: dict[str, list[NodeHour]] = {}
    for hour in hours:
        by_pool.setdefault(hour.pool, []).append(hour)
    pool_of = {(hour.hour_ms, hour.node_id): pool for pool, found in by_pool.items() for hour in found}
    used: dict[str, list[NodeUse]] = {}
    unplaced = 0
    for use in uses:
        pool = pool_of.get((use.hour_ms, use.node_id))
        if pool is None:
            unplaced += use.weight
        else:
            used.setdefault(pool, []).append(use)
    pools, shares = [], []
    for pool in sorted(by_pool):
        cost = _pool_cost(pool, by_pool[pool], rates.get(pool, rates.get("*", Decimal(0))))
        pools.append(cost)
        shares += _shares(cost, by_pool[pool], used.get(pool, []))
    return CostReport(tuple(pools), tuple(shares), unplaced)


def _pool_cost(pool: str, hours: Sequence[NodeHour], rate: Decimal) -> PoolCost:
    node_ms = sum(hour.present_ms for hour in hours)
    device_ms = sum(hour.present_ms * hour.devices for hour in hours)
    # Whole numbers until the one rounding: a third of an hour is no decimal.
    rate_millionths = int(rate.quantize(MILLIONTHS, ROUND_HALF_EVEN).scaleb(6))
    quotient, rest = divmod(node_ms * rate_millionths, HOUR_MS)
    half = 2 * rest - HOUR_MS
    rounded = quotient + (half > 0 or (half == 0 and quotient % 2 == 1))
    return PoolCost(pool, node_ms, device_ms, rate, EXACT.scaleb(Decimal(rounded), -6))


def _shares(cost: PoolCost, hours: Sequence[NodeHour], uses: Sequence[NodeUse]) -> list[Share]:
    load_ms, busy_ms = _load_and_busy(hours, uses)
    models: dict[str, list[NodeUse]] = {}
    for use in uses:
        models.setdefault(use.model, []).append(use)
    names = sorted(models)
    weights = [sum(use.weight for use in models[name]) for name in names]
    if not sum(weights):
        busy_ms = 0
    whole = int(cost.cost.scaleb(6))
    idle, load, busy = shared_out(whole, [cost.node_ms - load_ms - busy_ms, load_ms, busy_ms])
    shares = [
        Share(cost.pool, "model", name, weight, sum(use.run_ms for use in models[name]), _money(part))
        for name, weight, part in zip(names, weights, shared_out(busy, weights), strict=True)
    ]
    overhead = (Share(cost.pool, kind, "", 0, 0, _money(part)) for kind, part in (("load", load), ("idle", idle)))
    return [*shares, *overhead]


def _load_and_busy(hours: Sequence[NodeHour], uses: Sequence[NodeUse]) -> tuple[int, int]:
    run: dict[tuple[int, str], int] = {}
    for use in uses:
        place = (use.hour_ms, use.node_id)
        run[place] = run.get(place, 0) + use.run_ms
    load_ms = sum(hour.loading_ms for hour in hours)
    busy_ms = sum(
        min(hour.present_ms - hour.loading_ms, max(0, run.get((hour.hour_ms, hour.node_id), 0))) for hour in hours
    )
    return load_ms, busy_ms


def _money(millionths: int) -> Decimal:
    return EXACT.scaleb(Decimal(millionths), -6)

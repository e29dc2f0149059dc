"""Requests that meet a cold model against the memory-time spent: fixed keep-alive, hybrid histogram, ours.

Minute by minute, as the traces are: a function that was last active g minutes ago meets a warm model if minute g of its
idle time lies in a window of its policy. Memory is counted in idle minutes held; the active minute itself is held under
every policy and not counted. Our price of memory is set so that the first half of the trace costs as much memory as the
policy compared with; the second half is played at the same price and shown beside it, with the memory it really took.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Figure, Goal, Report
from benchmarks.traces import MINUTE_MS, OWNERS_8H, POOL_24H, Function, data_option, functions, require
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.forecast import Forecaster
from services.scheduler.domain.warmth.keep_alive import (
    ExpectedValueKeepAlive,
    FixedKeepAlive,
    HybridHistogram,
    KeepAlivePolicy,
    Window,
)

NAME = "prewarm"
DESCRIPTION = "cold meetings against memory-time on real traces: fixed keep-alive, hybrid histogram, ours"

FIXED_MS = 600_000
STEPS_A_FACTOR_E = 50  # prices are tried 2 % apart
CORRECTIONS = 1
TRACES = {"owners_8h": OWNERS_8H, "pool_24h": POOL_24H}


@dataclass(slots=True)
class Spent:
    """One policy on one half of a trace."""

    activations: int = 0  # minutes in which a function was active
    cold: int = 0
    first: int = 0  # of these, the first ever: no policy can foresee them
    prewarms: int = 0  # windows that began after the model had left
    memory_minutes: float = 0.0
    requests: int = 0

    @property
    def cold_share(self) -> float:
        """Of the activations."""
        return self.cold / max(1, self.activations)


@dataclass(frozen=True, slots=True)
class Activation:
    """A function is active in a minute."""

    minute: int
    version: VersionKey
    requests: int


def activations(chosen: Sequence[Function]) -> list[Activation]:
    """All of them, in order of time."""
    found = [
        Activation(minute, VersionKey(f"f{function.number}@1"), count)
        for function in chosen
        for minute, count in enumerate(function.minutes)
        if count
    ]
    return sorted(found, key=lambda each: (each.minute, each.version))


def play(trace: Sequence[Activation], policy: KeepAlivePolicy, minutes: int) -> tuple[Spent, Spent]:
    """Both halves. A gap belongs to the half in which it ends; open gaps are held to the end of the trace."""
    halves, last = (Spent(), Spent()), dict[VersionKey, tuple[int, tuple[Window, ...]]]()
    for each in trace:
        spent = halves[each.minute >= minutes // 2]
        spent.activations += 1
        spent.requests += each.requests
        before = last.get(each.version)
        if before is None:
            spent.cold += 1
            spent.first += 1
        else:
            _account(spent, before[1], each.minute - before[0], arrived=True)
        policy.record(each.version, each.minute * MINUTE_MS)
        last[each.version] = (each.minute, policy.windows(each.version))
    for minute, windows in last.values():
        _account(halves[1], windows, minutes - minute, arrived=False)
    return halves


def _account(spent: Spent, windows: Sequence[Window], gap: int, arrived: bool) -> None:
    """Minute x of the idle time is warm if its middle is. `gap` minutes passed; the last of them is the arrival's."""
    warm = False
    for window in windows:
        first, last = _minutes(window)
        if first > gap:
            break
        spent.memory_minutes += max(0, min(last, gap) - first + 1)
        spent.prewarms += window.from_ms > 0 and last >= first
        warm = warm or first <= gap <= last
    spent.cold += arrived and not warm


def _minutes(window: Window) -> tuple[int, int]:
    """The first and the last minute >= 1 of the idle time that are warm."""
    return max(1, math.ceil(window.from_ms / MINUTE_MS - 0.5)), math.ceil(window.to_ms / MINUTE_MS - 0.5) - 1


@dataclass(slots=True)
class _Prices:
    """Not a policy: notes what every price would have cost, while the forecaster sees the trace once."""

    forecaster: Forecaster
    memory: dict[int, float]  # by the price's step: minutes held at this hazard
    pending: dict[VersionKey, int]

    def note(self, version: VersionKey, minute: int) -> None:
        law, before = self.forecaster.law(version), self.pending.get(version)
        if law is not None and before is not None:
            end = (minute - before + 1) * MINUTE_MS
            for low, high, hazard in law.hazards():
                if low >= end:
                    break
                minutes = (min(high, end) - max(low, MINUTE_MS)) / MINUTE_MS
                if minutes > 0 and hazard > 0:
                    step = math.floor(math.log(hazard) * STEPS_A_FACTOR_E)
                    self.memory[step] = self.memory.get(step, 0.0) + minutes
        self.forecaster.record(version, minute * MINUTE_MS)
        self.pending[version] = minute


def price_for(trace: Sequence[Activation], minutes: int, memory_minutes: Sequence[float]) -> Iterator[float]:
    """For each amount of memory the price at which the first half of the trace takes it. One pass."""
    prices = _Prices(Forecaster(step_ms=MINUTE_MS), {}, {})
    for each in trace:
        if each.minute < minutes // 2:
            prices.note(each.version, each.minute)
    for wanted in memory_minutes:
        left = wanted
        for step in sorted(prices.memory, reverse=True):
            left -= prices.memory[step]
            if left < 0:
                break
        yield math.exp((step + 1) / STEPS_A_FACTOR_E)


def fitted(trace: Sequence[Activation], minutes: int, memory_minutes: Sequence[float]) -> list[float]:
    """`price_for`, corrected once by what the first half really took: whole minutes make a difference."""
    first = [each for each in trace if each.minute < minutes // 2]
    aims = list(memory_minutes)
    for _ in range(CORRECTIONS):
        for place, price in enumerate(price_for(trace, minutes, aims)):
            policy = ExpectedValueKeepAlive(Forecaster(step_ms=MINUTE_MS), price)
            took = play(first, policy, minutes)[0].memory_minutes
            aims[place] *= memory_minutes[place] / took
    return list(price_for(trace, minutes, aims))


def measure(name: str, data: Path) -> tuple[dict[str, Figure], list[Goal]]:
    """One trace."""
    chosen = functions(data / TRACES[name])
    trace, minutes = activations(chosen), len(chosen[0].minutes)
    rivals: dict[str, Callable[[], KeepAlivePolicy]] = {
        "fixed_10min": lambda: FixedKeepAlive(FIXED_MS),
        "hybrid": HybridHistogram,
    }
    found = {rival: play(trace, make(), minutes) for rival, make in rivals.items()}
    prices = fitted(trace, minutes, [found[rival][0].memory_minutes for rival in rivals])
    figures: dict[str, Figure] = {f"{name}_activations": len(trace)}
    goals: list[Goal] = []
    for rival, price in zip(rivals, prices, strict=True):
        ours = play(trace, ExpectedValueKeepAlive(Forecaster(step_ms=MINUTE_MS), price), minutes)
        for half, title in enumerate(("first", "second")):
            theirs, mine = found[rival][half], ours[half]
            stem = f"{name}_{title}_half"
            figures |= _figures(f"{stem}_{rival}", theirs) | _figures(f"{stem}_ours_as_{rival}", mine)
            figures[f"{stem}_memory_of_ours_to_{rival}"] = round(mine.memory_minutes / theirs.memory_minutes, 4)
            where = f"{name}, {title} half: cold meetings of ours / of {rival}"
            goals.append(Goal.at_most(where, 0.5 if rival == "fixed_10min" else 0.9999, mine.cold / theirs.cold))
    return figures, goals


def _figures(stem: str, spent: Spent) -> dict[str, Figure]:
    return {
        f"{stem}_cold_share": round(spent.cold_share, 5),
        f"{stem}_cold_share_of_requests": round(spent.cold / spent.requests, 7),
        f"{stem}_cold": spent.cold,
        f"{stem}_cold_first_ever": spent.first,
        f"{stem}_prewarms": spent.prewarms,
        f"{stem}_memory_minutes": round(spent.memory_minutes),
    }


def run(arguments: Sequence[str]) -> Report:
    """Both traces, on two cores."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prewarm")
    data_option(parser)
    parser.add_argument("--only", nargs="+", choices=TRACES, default=list(TRACES), help="traces")
    options = parser.parse_args(arguments)
    require(options.data, *(TRACES[name] for name in options.only))
    figures: dict[str, Figure] = {}
    goals: list[Goal] = []
    with ProcessPoolExecutor() as pool:
        for some, reached in pool.map(measure, options.only, [options.data] * len(options.only)):
            figures |= some
            goals.extend(reached)
    return Report(NAME, figures, {}, goals)

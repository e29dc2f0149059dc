"""Requests that meet a cold model against the memory-time spent: fixed keep-alive, hybrid histogram, ours.

Minute by minute, as the traces are: a function that was last active g minutes ago meets a warm model if minute g of its
idle time lies in a window of its policy. Memory is counted in idle minutes held; the active minute itself is held under
every policy and not counted. To compare at equal memory, our price of memory is set, for each half of the trace, to
what makes that half take as much memory as the policy compared with. Nothing else is fitted there: constants of the
forecast were tuned on first halves. The second half is also shown at the price of the first.
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
from services.scheduler.domain.warmth.gap_law import GapLaw
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


def price_for(
    trace: Sequence[Activation], minutes: int, wanted: Sequence[tuple[float, float]]
) -> Iterator[list[float]]:
    """For each pair of memory minutes in both halves the prices at which ours takes them. One pass over the trace."""
    forecaster, last = Forecaster(step_ms=MINUTE_MS), dict[VersionKey, int]()
    held: tuple[dict[int, float], dict[int, float]] = ({}, {})  # by half, by step of the price: minutes at this hazard
    for each in trace:
        law, before = forecaster.law(each.version), last.get(each.version)
        if law is not None and before is not None:
            _note(held[each.minute >= minutes // 2], law, each.minute - before)
        forecaster.record(each.version, each.minute * MINUTE_MS)
        last[each.version] = each.minute
    for version, minute in last.items():
        law = forecaster.law(version)
        if law is not None:
            _note(held[1], law, minutes - minute)
    for pair in wanted:
        yield [_price(steps, aim) for steps, aim in zip(held, pair, strict=True)]


def _note(steps: dict[int, float], law: GapLaw, gap: int) -> None:
    for low, high, hazard in law.hazards():
        first, last = _minutes(Window(low, high))
        if first > gap:
            return
        if last >= first and hazard > 0:
            step = math.floor(math.log(hazard) * STEPS_A_FACTOR_E)
            steps[step] = steps.get(step, 0.0) + min(last, gap) - first + 1


def _price(steps: dict[int, float], left: float) -> float:
    for step in sorted(steps, reverse=True):
        left -= steps[step]
        if left < 0:
            return math.exp((step + 1) / STEPS_A_FACTOR_E)
    return 0.0


def measure(name: str, data: Path) -> tuple[dict[str, Figure], list[Goal]]:
    """One trace."""
    chosen = functions(data / TRACES[name])
    trace, minutes = activations(chosen), len(chosen[0].minutes)
    rivals: dict[str, Callable[[], KeepAlivePolicy]] = {
        "fixed_10min": lambda: FixedKeepAlive(FIXED_MS),
        "hybrid": HybridHistogram,
    }
    found = {rival: play(trace, make(), minutes) for rival, make in rivals.items()}
    wanted = [(first.memory_minutes, second.memory_minutes) for first, second in found.values()]
    figures: dict[str, Figure] = {f"{name}_activations": len(trace)}
    goals: list[Goal] = []
    for rival, prices in zip(rivals, price_for(trace, minutes, wanted), strict=True):
        ours = [play(trace, ExpectedValueKeepAlive(Forecaster(step_ms=MINUTE_MS), price), minutes) for price in prices]
        for half, title in enumerate(("first_half", "second_half")):
            theirs, mine = found[rival][half], ours[half][half]
            figures |= _figures(f"{name}_{title}_{rival}", theirs)
            figures |= _figures(f"{name}_{title}_ours_as_{rival}", mine)
            figures[f"{name}_{title}_ours_memory_to_{rival}"] = round(mine.memory_minutes / theirs.memory_minutes, 4)
            where = f"{name}, {title}: cold meetings of ours / of {rival}"
            goals.append(Goal.at_most(where, 0.5 if rival == "fixed_10min" else 0.9999, mine.cold / theirs.cold))
        kept, theirs = ours[0][1], found[rival][1]
        stem = f"{name}_second_half_at_first_halfs_price"
        figures[f"{stem}_cold_to_{rival}"] = round(kept.cold / theirs.cold, 4)
        figures[f"{stem}_memory_to_{rival}"] = round(kept.memory_minutes / theirs.memory_minutes, 4)
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

"""Reading the public workload traces that the residency benchmarks play. Not a benchmark: it has no `NAME`.

The traces stay where they are (`--data DIR`); their README says where they come from and under which licence. Counts
per minute or per 10 minutes are turned into accesses here, and every such choice is stated at its function.
"""

import argparse
import csv
import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"
OWNERS_8H = "azure_functions_owners_8h.csv.gz"
POOL_24H = "azure_functions_pool_24h.csv.gz"
SERVEGEN_LOAD = "servegen_tenant_load_10min.csv.gz"
SERVEGEN_LENGTHS = "servegen_tenant_lengths.csv.gz"
MINUTE_MS = 60_000
WINDOW_MS = 600_000


@dataclass(frozen=True, slots=True)
class Access:
    """`requests` requests for one model at about the same time."""

    at_ms: int
    model: int
    requests: float = 1.0


@dataclass(frozen=True, slots=True)
class Function:
    """One function of an Azure trace: requests in each minute; `punctual` if a timer calls it."""

    number: int
    minutes: tuple[int, ...]
    punctual: bool = False


@dataclass(frozen=True, slots=True)
class Tenant:
    """One ServeGen tenant: requests and coefficient of variation of the gaps in each 10-minute window."""

    name: str
    windows: tuple[int, ...]
    variation: tuple[float, ...]


def data_option(parser: argparse.ArgumentParser) -> None:
    """Add `--data`."""
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")


def require(folder: Path, *names: str) -> None:
    """Exit with a message if a trace is not there."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise SystemExit(f"no traces in {folder}: {', '.join(missing)} missing; name their folder with --data DIR")


def functions(path: Path) -> list[Function]:
    """The functions of an Azure trace, most invoked first."""
    return [
        Function(
            int(row["function_id"]),
            tuple(map(int, row["invocations_per_minute"].split())),
            row.get("trigger") == "timer",
        )
        for row in _rows(path)
    ]


def minute_accesses(chosen: list[Function], most_a_minute: int, seed: int) -> list[Access]:
    """Accesses in order of time. A minute with n requests of a function becomes min(n, most) accesses.

    Their seconds are drawn at random, which is harder to foresee than the real thing; only where the trace says that a
    timer calls, they are evenly spaced from the same second of every minute, for timers are punctual.
    """
    chance, found = random.Random(seed), list[Access]()
    for function in chosen:
        phase = chance.random()
        for minute, count in enumerate(function.minutes):
            taken = min(count, most_a_minute)
            for each in range(taken):
                second = (phase + each) / taken if function.punctual else chance.random()
                found.append(Access(int((minute + second) * MINUTE_MS), function.number, count / taken))
    return sorted(found, key=lambda access: (access.at_ms, access.model))


def tenants(path: Path, windows_least: int = 0) -> list[Tenant]:
    """The ServeGen tenants with at least so many windows."""
    found = []
    for row in _rows(path):
        if int(row["n_windows"]) >= windows_least:
            windows = tuple(map(int, row["requests_per_window"].split(" ")))
            variation = tuple(float(item[1:] or 1) if item else 1.0 for item in row["iat_cv_per_window"].split(" "))
            found.append(Tenant(f"{row['model_id']}/{row['tenant_id']}", windows, variation))
    return found


def thinned(chosen: list[Tenant], days: float, a_second: float, seed: int) -> list[Access]:
    """Requests of the tenants over their first days, thinned by one factor to a mean total rate, in order of time.

    Gaps inside a window are drawn from a gamma law with the window's own variation and stretched to fill the window.
    """
    chance, count = random.Random(seed), int(days * 144)
    total = sum(sum(tenant.windows[:count]) for tenant in chosen)
    keep = min(1.0, a_second * count * WINDOW_MS / 1000 / total)
    found: list[Access] = []
    for number, tenant in enumerate(chosen):
        for window, (requests, variation) in enumerate(zip(tenant.windows[:count], tenant.variation, strict=False)):
            kept = _binomial(chance, requests, keep)
            starts = _burst(chance, kept, variation)
            found.extend(Access(int((window + start) * WINDOW_MS), number) for start in starts)
    return sorted(found, key=lambda access: (access.at_ms, access.model))


def _binomial(chance: random.Random, count: int, share: float) -> int:
    mean, spread = count * share, (count * share * (1 - share)) ** 0.5
    if spread > 5:  # the normal law is close enough from there
        return max(0, min(count, round(chance.gauss(mean, spread))))
    kept, place = 0, 0.0
    while share > 0 and (place := place + max(1.0, chance.expovariate(1) / share)) <= count:
        kept += 1
    return kept


def _burst(chance: random.Random, count: int, variation: float) -> list[float]:
    if count == 0:
        return []
    shape = 1 / max(0.1, min(10.0, variation)) ** 2
    gaps = [chance.gammavariate(shape, 1 / shape) for _ in range(count + 1)]
    total, place, starts = sum(gaps) or 1.0, 0.0, []
    for gap in gaps[:-1]:
        place += gap
        starts.append(min(place / total, 0.999_999))
    return starts


def _rows(path: Path) -> Iterator[dict[str, str]]:
    csv.field_size_limit(10**9)
    with gzip.open(path, "rt") as lines:
        yield from csv.DictReader(lines)


def mean_lengths(path: Path) -> dict[str, tuple[float, float]]:
    """Mean input and output tokens of each tenant that has both."""
    found: dict[str, dict[str, float]] = {}
    for row in _rows(path):
        if row["field"] in ("input_tokens", "output_tokens"):
            found.setdefault(f"{row['model_id']}/{row['tenant_id']}", {})[row["field"]] = float(row["mean"])
    return {name: (each["input_tokens"], each["output_tokens"]) for name, each in found.items() if len(each) == 2}

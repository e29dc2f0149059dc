"""A fleet of GPUs serving thousands of models on virtual time, with the production queue and placement.

Arrivals take their shape from a public trace of functions (one function a model; invocations a minute to the power
`--skew`, because function calls are more unequal than calls of models; a guess), their lengths from a public trace of a
chat service. Everything else is drawn from `--seed`, faults included. See `simulated_fleet.py` for what is checked.

Costs, a 16-bit model of P parameters on one accelerator with 80 GB: a decode step reads the weights once, 2P bytes at
2,039 GB/s, and takes 1.5 times that (A100 80GB data sheet; the factor is a guess for attention and launch overhead, and
the same at any batch up to the slots); a prefill token is 2P operations at half of 312 TFLOP/s (same sheet). Weights
come at 0.5 GB/s from the source, 2 GB/s from NVMe, 10 GB/s from host memory (`cold_start.py`); an engine starts in 3 s
(a guess: between the 0.5 s of an empty model and the 7 s of vLLM on a CPU, both measured).
"""

import argparse
import csv
import gzip
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import traces
from benchmarks.report import Figure, Goal, Report
from benchmarks.simulated_fleet import Fleet, ModelCost, Request, Speeds
from benchmarks.simulation_worker import quantile
from roundhouse.vocabulary import NodeId, PriorityClass
from services.scheduler.domain.records import version_key
from services.scheduler.domain.service import Policy

NAME = "simulate"
DESCRIPTION = "a fleet on virtual time: waits, loads, evictions; faults by seed; up to 1,000 nodes, 2,000 models"

GB = 10**9
CAPACITY = 80 * GB
SPEEDS = Speeds(source=500_000, disk=2_000_000, host=10_000_000, host_bytes=512 * GB)
SIZES = ((3, 0.5), (7, 0.4), (13, 0.1))  # thousand million parameters, and their share of the models; a guess
KV_SHARE = 0.4  # of the weights' bytes again, for 16 requests; a guess
SLOTS = 16
START_MS = 3_000
SLO_MS = 2_000
PATIENCE_MS = 120_000
OUTPUT_MAX = 2_048
CLASS_OF_TENANT = (PriorityClass.INTERACTIVE, *[PriorityClass.STANDARD] * 3, PriorityClass.BATCH)
CONVERSATIONS = "azure_llm_conv_2023.csv.gz"


def run(arguments: Sequence[str]) -> Report:
    """Simulate. Exits with a message if a trace is not there."""
    options = _options(arguments)
    traces.require(options.data, traces.POOL_24H, CONVERSATIONS)
    chance = random.Random(options.seed)
    models = [_model(number, chance) for number in range(options.models)]
    begun, begun_cpu = time.perf_counter(), time.process_time()
    requests = list(_requests(options, chance))
    fleet = Fleet(models, options.nodes, CAPACITY, SPEEDS, Policy())
    length_ms = options.minutes * traces.MINUTE_MS
    for _ in range(options.faults):
        node_id = NodeId(f"n{chance.randrange(options.nodes):04d}")
        fleet.at(chance.randrange(length_ms), fleet.kill, node_id, chance.randrange(10_000, 600_000))
    fleet.run(track(requests, "simulating", console=Console(stderr=True), update_period=0.5))
    took = (time.perf_counter() - begun, time.process_time() - begun_cpu)
    return _report(fleet, requests, options, *took)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}", description=DESCRIPTION)
    traces.data_option(parser)
    for name, value in (("nodes", 100), ("models", 1_000), ("requests", 100_000), ("minutes", 60), ("tenants", 500)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--skew", type=float, default=0.5, help="power of the invocations a minute (default 0.5)")
    parser.add_argument("--faults", type=int, default=10, help="deaths of nodes (default 10)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def _model(number: int, chance: random.Random) -> ModelCost:
    billions = chance.choices([size for size, _ in SIZES], [share for _, share in SIZES])[0]
    weights = 2 * billions * GB
    return ModelCost(
        version=version_key(f"m{number}", "sha256:1"),
        device_bytes=int(weights * (1 + KV_SHARE)),
        weight_bytes=weights,
        slots=SLOTS,
        prefill_us=round(2 * billions * 1e9 / (0.5 * 312e12) * 1e6),
        decode_us=round(1.5 * weights / 2_039e9 * 1e6),
        start_ms=START_MS,
        slo_ms=SLO_MS,
    )


def _requests(options: argparse.Namespace, chance: random.Random) -> Iterator[Request]:
    """In order of time. Model n has the shape of function n; past the last one, of function n again, hours later."""
    shapes = traces.functions(options.data / traces.POOL_24H)
    cells: list[tuple[int, int]] = []
    weights: list[float] = []
    for model in range(options.models):
        lap, function = divmod(model, len(shapes))
        counts = shapes[function].minutes
        for minute in range(options.minutes):
            count = counts[(minute + 240 * lap) % len(counts)]
            if count:
                cells.append((minute, model))
                weights.append(count**options.skew / (1 + lap))
    totals = list(accumulate(weights))
    lengths = _lengths(options.data / CONVERSATIONS)
    drawn = []
    for _ in range(options.requests):
        minute, model = cells[bisect_left(totals, chance.random() * totals[-1])]
        drawn.append((minute * traces.MINUTE_MS + chance.randrange(traces.MINUTE_MS), model))
    for at_ms, model in sorted(drawn):
        number = model % options.tenants if model % 10 else chance.randrange(options.tenants)  # every tenth is shared
        read, written = chance.choice(lengths)
        of_class = CLASS_OF_TENANT[number % len(CLASS_OF_TENANT)]
        most = max(OUTPUT_MAX, written)
        yield Request(at_ms, f"t{number}", of_class, model, read, written, most, PATIENCE_MS)


def _lengths(path: Path) -> list[tuple[int, int]]:
    with gzip.open(path, "rt") as lines:
        return [(int(row["input_tokens"]), int(row["output_tokens"])) for row in csv.DictReader(lines)]


def _report(
    fleet: Fleet, requests: Sequence[Request], options: argparse.Namespace, seconds: float, cpu_s: float
) -> Report:
    granted = [each for each in requests if each.granted_ms >= 0]
    figures: dict[str, Figure] = {
        "nodes": options.nodes,
        "models": options.models,
        "requests": len(requests),
        "virtual_minutes": round(fleet.now_ms / traces.MINUTE_MS, 1),
    }
    figures |= {name.lower(): count for name, count in sorted(fleet.counts.items())}
    figures["share_that_waited_for_a_load"] = round(sum(each.cold for each in granted) / max(1, len(granted)), 4)
    for name in PriorityClass:
        waits = [each.granted_ms - each.at_ms for each in granted if each.priority_class is name]
        for part, label in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            figures[f"{name.value}_wait_ms_{label}"] = quantile(waits, part)
    figures["slots_in_use_mean"] = round(fleet.busy_ms / max(1, fleet.now_ms), 1)
    figures["wall_s"] = round(seconds, 1)
    figures["cpu_s"] = round(cpu_s, 1)  # other load on the machine makes the wall time longer, not this
    figures["requests_simulated_per_cpu_second"] = round(len(requests) / cpu_s)
    ended = sum(bool(each.ended) for each in requests)
    goals = (
        Goal.at_least("requests that ended once", len(requests), ended),
        Goal.at_most("CPU seconds for a million such requests", 600, cpu_s * 1e6 / max(1, len(requests))),
    )
    return Report(NAME, figures, {}, goals)

"""kill -9 of each part at each step of streaming requests: streamed = recorded = billed, none lost or twice.

A whole mesh on this machine, with a model that takes 20 ms a token; eight clients. Each part in turn is killed while a
marked request stands at each step (`kill_load.STEPS`), by a seed, and started again as its supervisor would. What
"equal" means for a stream whose own gateway was killed: see `kill_books`. tests/e2e/test_kill_matrix.py runs a part.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

import httpx
import yaml
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js.api import ConsumerConfig, DeliverPolicy
from rich.console import Console
from rich.table import Table

from benchmarks.kill_books import PIECE_TOKENS_MAX, Row, Tally, billed_by_request, tally
from benchmarks.kill_load import STEPS, Load, Mark
from benchmarks.report import Figure, Goal, Report
from deploy.local.parts import ClusterOptions
from roundhouse import subjects
from roundhouse.budgets import budget_key, period_text, spent_field
from roundhouse.event_bus import NatsBus
from roundhouse.redis_edge import open_redis
from roundhouse.wire.v1.usage_pb2 import RatedRecord
from tests import infra
from tests.builders.checkpoints import knob_model
from tests.e2e.mesh import Mesh, mesh_running

NAME = "killmatrix"
DESCRIPTION = "kill -9 of each part at each step of 500 requests: streamed = ledger = billing stream"

PARTS: Final = ("gateway", "scheduler", "nats", "metering", "database")
MODEL_BYTES: Final = 20 * 2**20
FEEDS: Final = 20  # answers whose way to the budget is timed, for each seed
SETTLE_S: Final = 60.0  # for the books after the last request of a block
LEASE_S: Final = 60.0  # at most, for the scheduler to settle what a killed gateway had: that event must not add
GENEROUS: Final = {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000, "concurrent_requests": 256}
OPTIONS: Final = ClusterOptions(
    nodes=1,
    device_bytes=2 * MODEL_BYTES,
    arena_bytes=16 * 2**20,
    http_port=0,
    grpc_port=0,
    admin_port=0,
    cluster="kill",
    drain_seconds=3,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done. `requests` of one part."""

    requests: int
    parts: Sequence[str]
    steps: Sequence[str]
    seed: int


@dataclass(slots=True)
class Arena:
    """A mesh, and its database if that is a server of its own."""

    mesh: Mesh
    database: infra.FaultyServer | None

    def kill(self, part: str) -> None:
        """SIGKILL, then start again on the same data and wait until it is ready."""
        if part == "database":
            assert self.database is not None
            self.database.kill()
            self.database.start()
        else:
            self.mesh.kill(part)
            self.mesh.restart(part)


@contextmanager
def arena_running(ledger: str) -> Iterator[Arena]:
    """A mesh of its own, gone afterwards. `ledger`: "postgresql" or "sqlite"."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rh-kill-")))
        database = stack.enter_context(infra.postgres_running()) if ledger == "postgresql" else None
        options = OPTIONS
        if database is not None:
            values = {each.name: getattr(OPTIONS, each.name) for each in fields(OPTIONS)}
            options = ClusterOptions(**{**values, "ledger_url": database.url})
        mesh = stack.enter_context(mesh_running(folder / "home", options, _catalogue(folder)))
        yield Arena(mesh, database)


def _catalogue(folder: Path) -> Path:
    story = knob_model(folder / "story", tokens=32, token_interval_ms=20)
    model = {
        "name": "story",
        "source": {"path": str(story)},
        "engine": "triton",
        "interface": "llm",
        "context_tokens": 2048,
        "slots": 8,
        "memory": {"device": MODEL_BYTES, "kv_pool_tokens": 4096},
        "price": {"id": "p1", "input": "1", "output": "2"},
    }
    path = folder / "catalogue.yaml"
    tenant = {"name": "acme", "limits": GENEROUS, "budget": {"amount": "1000"}}
    declared = {"version": 1, "tenants": [tenant], "models": [model]}
    path.write_text(yaml.safe_dump(declared, sort_keys=False))
    return path


async def matrix(arena: Arena, plan: Plan) -> list[Tally]:
    """One line for each part of the plan; asserts nothing."""
    chance = random.Random(plan.seed)
    key, key_id = await _own_key(arena.mesh)
    books = _Books(arena.mesh, key_id)
    lines = []
    for part in plan.parts:
        load = Load(arena.mesh.http_url, key, "story", chance)
        marks = [Mark(step, lambda name=part: asyncio.to_thread(arena.kill, name), chance) for step in plan.steps]  # type: ignore[misc]
        await load.run(plan.requests, marks)
        await asyncio.to_thread(arena.mesh.wait_ready, 60.0)
        streamed = {client.request_id for client in load.clients if client.tokens}
        await books.settle(streamed)
        if part == "gateway":
            await _until_nothing_runs(arena.mesh)
            await books.settle(streamed)
        rows, billed = await books.news()
        lines.append(tally(part, len(marks), load.clients, rows, billed))
    return lines


async def _until_nothing_runs(mesh: Mesh) -> None:
    """Until no request holds a slot; after `LEASE_S` whatever is so."""
    ends = time.monotonic() + LEASE_S
    async with httpx.AsyncClient(base_url=mesh.ops_url("scheduler"), timeout=30) as client:
        while time.monotonic() < ends:
            lines = (await client.get("/metrics")).text.splitlines()
            held = [float(line.split()[-1]) for line in lines if line.startswith("roundhouse_scheduler_slots_in_use{")]
            if held and not any(held):
                return
            await asyncio.sleep(0.2)  # between two looks at another process


async def _own_key(mesh: Mesh) -> tuple[str, str]:
    """A key of this run alone, and its id: what others of the tenant did is not ours, however late it is recorded."""
    wish = {"tenant": "acme", "scopes": ["inference"], "label": "killmatrix"}
    async with _operator(mesh) as client:
        answer = await client.post("/keys", json=wish)
        answer.raise_for_status()
        made = answer.json()
        return made["key"], made["key_id"]


class _Books:
    """What one key used, in the ledger and the billing stream of a mesh, read block by block."""

    def __init__(self, mesh: Mesh, key_id: str) -> None:
        self._mesh = mesh
        self._key_id = key_id
        self._taken: set[str] = set()  # requests of earlier blocks

    async def settle(self, streamed: set[str]) -> None:
        """Wait until the ledger has all of these requests and the billing stream all of the ledger, or give up."""
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            try:
                missing = streamed - {row.request_id for row in await self._rows()}
                state = await _get(self._mesh, "/metering/reconcile")
            except httpx.HTTPError:
                missing, state = streamed, {}
            if not missing and state.get("sequence") == state.get("published_sequence"):
                return
            await asyncio.sleep(0.2)  # between two looks at another process

    async def news(self) -> tuple[list[Row], dict[str, int]]:
        """Rows and billed tokens of requests that no earlier block had."""
        rows = [row for row in await self._rows() if row.request_id not in self._taken]
        billed = billed_by_request(await self._records())
        news = {request: tokens for request, tokens in billed.items() if request not in self._taken}
        self._taken |= {row.request_id for row in rows} | news.keys()
        return rows, news

    async def _rows(self) -> list[Row]:
        rows: list[Row] = []
        cursor = ""
        while True:
            where = {"key": self._key_id, **({"cursor": cursor} if cursor else {})}
            page = await _get(self._mesh, "/usage", group_by="request", limit="1000", **where)
            rows += [Row(row["request_id"], row["attempt"], row["output_tokens"]) for row in page["rows"]]
            cursor = page["next_cursor"] or ""
            if not cursor:
                return rows

    async def _records(self) -> list[RatedRecord]:
        bus = await NatsBus.connect(self._mesh.nats_url, name="killmatrix")
        try:
            config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
            subscription = await bus.jetstream.subscribe(
                subjects.BILLING_RECORDS, stream=subjects.BILLING_STREAM, ordered_consumer=True, config=config
            )
            records: list[RatedRecord] = []
            more = True
            while more:
                try:
                    message = await subscription.next_msg(10)
                except NatsTimeoutError:
                    break  # nothing was billed yet
                record = RatedRecord.FromString(message.data)
                if record.event.data.key_id == self._key_id:
                    records.append(record)
                more = message.metadata.num_pending > 0
            return records
        finally:
            await bus.close()


async def _differences(mesh: Mesh, since_ms: int) -> list[dict[str, str]]:
    """What the mesh's own reconciler finds."""
    until_ms = round(time.time() * 1000)
    found = await _get(mesh, "/metering/differences", **{"from": str(since_ms), "to": str(until_ms)})
    return list(found["differences"])


async def _get(mesh: Mesh, path: str, **parameters: str) -> dict[str, Any]:
    async with _operator(mesh) as client:
        answer = await client.get(path, params=parameters)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def _operator(mesh: Mesh) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    return httpx.AsyncClient(base_url=f"{mesh.admin_url}/admin/v1", headers=headers, timeout=30)


@dataclass(frozen=True, slots=True)
class Seed:
    """What one seed showed: the lines, what the mesh's own reconciler says afterwards, how soon spend is known."""

    lines: Sequence[Tally]
    differences: Sequence[dict[str, str]]
    feeds_ms: Sequence[float]


def run_seed(ledger: str, plan: Plan) -> Seed:
    """A fresh mesh for one seed."""
    with arena_running(ledger) as arena:

        async def all_of_it() -> Seed:
            began_ms = round(time.time() * 1000)
            lines = await matrix(arena, plan)
            differences = await _differences(arena.mesh, began_ms)
            return Seed(lines, differences, await _feeds(arena.mesh))

        return asyncio.run(all_of_it())


async def _feeds(mesh: Mesh) -> list[float]:
    """Ms from the end of an answer until the store, which gateways read, has its cost in what was spent."""
    redis = open_redis(mesh.redis_url)
    field = spent_field(period_text("month", round(time.time() * 1000)), "USD")
    times = []
    try:
        for number in range(FEEDS):
            before = int(await cast("Any", redis.hget(budget_key("acme"), field)) or 0)
            load = Load(mesh.http_url, mesh.keys["acme"], "story", random.Random(number))
            await load.run(1, ())
            ended = time.monotonic()
            async with asyncio.timeout(SETTLE_S):
                while int(await cast("Any", redis.hget(budget_key("acme"), field)) or 0) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)  # between two looks at the store
            times.append((time.monotonic() - ended) * 1000)
    finally:
        await redis.aclose()
    return times


def run(arguments: Sequence[str]) -> Report:
    """Kill everything, at every step, for every seed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {NAME}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=500, help="of one seed, over all parts")
    parser.add_argument("--ledger", choices=("postgresql", "sqlite"), default=None)
    options = parser.parse_args(arguments)
    ledger = options.ledger or ("sqlite" if infra.postgres_missing() else "postgresql")
    parts = [part for part in PARTS if part != "database" or ledger == "postgresql"]
    seeds: list[Seed] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        seeds.append(run_seed(ledger, Plan(options.requests // len(parts), parts, STEPS, seed)))
        show(seeds[-1].lines, f"seed {seed}, {ledger}")
    lines = [line for each in seeds for line in each.lines]
    totals = [_sum(part, [line for line in lines if line.part == part]) for part in parts]
    show(totals, f"{options.seeds} seeds, {ledger}")
    return _report(ledger, seeds, totals)


def _sum(part: str, lines: Sequence[Tally]) -> Tally:
    total = Tally(part)
    for each in fields(Tally)[1:]:
        merge = max if each.name == "in_flight_max" else sum
        setattr(total, each.name, merge([getattr(line, each.name) for line in lines]))
    return total


def show(lines: Sequence[Tally], title: str) -> None:
    """Print the table."""
    table = Table(*(each.name.replace("_", " ") for each in fields(Tally)), title=title, title_justify="left")
    for line in lines:
        table.add_row(*(str(value) for value in asdict(line).values()))
    Console(width=200).print(table)


def _report(ledger: str, seeds: Sequence[Seed], totals: Sequence[Tally]) -> Report:
    differences = [each for seed in seeds for each in seed.differences]
    feeds_ms = sorted(each for seed in seeds for each in seed.feeds_ms)
    figures: dict[str, Figure] = {"ledger": ledger, "seeds": len(seeds)}
    for line in totals:
        figures |= {f"{line.part}_{name}": value for name, value in asdict(line).items() if name != "part"}
    figures |= {"spend_known_ms_p50": round(median(feeds_ms), 1), "spend_known_ms_max": round(feeds_ms[-1], 1)}
    whole = _sum("all", totals)
    goals = [
        Goal.at_most("tokens lost", 0, whole.lost),
        Goal.at_most("tokens billed twice", 0, whole.double),
        Goal("ledger = billing stream, tokens", f"{whole.ledger}", whole.billed, whole.ledger == whole.billed),
        Goal(
            "billed beyond what clients received: pieces in flight at a kill of their gateway",
            f"{whole.ledger - whole.streamed}",
            whole.in_flight,
            whole.in_flight == whole.ledger - whole.streamed,
        ),
        Goal.at_most("tokens of the largest piece in flight", PIECE_TOKENS_MAX, whole.in_flight_max),
        Goal.at_most("differences that the reconciler reports", 0, len(differences)),
        Goal.at_most("ms until spend is known to the gateways, at most", 2_000, feeds_ms[-1]),
    ]
    for each in differences:
        Console(stderr=True, width=200).print(each)
    return Report(NAME, figures, goals=goals)

"""How many blocks of real prompts a node's arena finds again, against its size: ours, LRU, Belady's rule, no bound.

Ours is `BlockTable` itself, driven with every prompt of a trace: look up, store what was missing, keep room. LRU evicts
the ends of prompts first, as ours does. Belady's rule evicts the block whose next use is farthest away, which nobody
can know; it is the bound, not a competitor. Ours learns how sessions think while it plays, from nothing, and its hits
count from the first prompt on: no part of a trace is trained on before it is played. Only leading runs count as hits.
One tenant: shares have tests of their own. Mooncake blocks are of 512 tokens, agentic ones of 64; agentic sessions are
a sample, started evenly over an hour. The conversations' times lie on a grid of 3 s; what has one time is spread over
the 3 s. What can be reached without the future: docs/decisions/0166-what-the-past-tells.md.
"""

import argparse
import csv
import gzip
import heapq
import itertools
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Figure, Goal, Report
from services.kvstore.domain.block_table import BlockTable
from services.kvstore.domain.records import ROOT, Acquired, Holder, NewBlocks, Reserved, WrittenBlock
from services.kvstore.domain.slot_arena import SlotArena

NAME = "prefix"
DESCRIPTION = "block hit rate on real traces against capacity: ours, LRU, Belady's rule"

MAKE_ROOM = 256
GOAL = 0.95  # of Belady's hits
SALT, MODEL, LENGTH = b"tenant", b"model", 64
HOLDER = Holder("benchmark", 1_000)
SESSION_START_S = 3_600.0
GRID_MS = 3_000  # the conversations' times are whole multiples of it; it was not so when they were recorded
DATA = Path(__file__).resolve().parents[1] / ".." / "shared" / "data"


@dataclass(frozen=True, slots=True)
class Prompt:
    """When it came, in ms, and its blocks."""

    at_ms: int
    blocks: tuple[int, ...]


def run(arguments: Sequence[str]) -> Report:
    """Play every trace at every size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks prefix")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the traces")
    parser.add_argument("--blocks", type=int, nargs="+", default=[1_000, 3_000, 10_000, 30_000, 60_000], help="sizes")
    parser.add_argument("--sessions", type=int, default=12, help="agentic coding sessions to play")
    options = parser.parse_args(arguments)
    traces: dict[str, Callable[[], list[Prompt]]] = {
        "conversation": lambda: spread(mooncake(options.data / "mooncake_conversation.jsonl.gz"), GRID_MS),
        "synthetic": lambda: mooncake(options.data / "mooncake_synthetic.jsonl.gz"),
        "coding": lambda: coding(options.data / "agentic_coding_sessions.csv.gz", options.sessions),
    }
    figures: dict[str, Figure] = {}
    goals: list[Goal] = []
    for name, read in traces.items():
        try:
            prompts = read()
        except FileNotFoundError as error:
            figures[f"{name}_skipped"] = f"no such file: {error.filename}"
            continue
        _measure(name, prompts, options.blocks, figures, goals)
    return Report(NAME, figures, {}, goals)


def _measure(
    name: str, prompts: Sequence[Prompt], sizes: Sequence[int], figures: dict[str, Figure], goals: list[Goal]
) -> None:
    total = sum(len(prompt.blocks) for prompt in prompts)
    figures[f"{name}_blocks"] = total
    figures[f"{name}_infinite_hit_share"] = belady(prompts, total) / total
    for size in sizes:
        best, mine, plain = belady(prompts, size), ours(prompts, size), lru(prompts, size)
        figures[f"{name}_{size}_belady_hit_share"] = best / total
        figures[f"{name}_{size}_ours_hit_share"] = mine / total
        figures[f"{name}_{size}_lru_hit_share"] = plain / total
        figures[f"{name}_{size}_lru_of_belady"] = plain / best
        goals.append(Goal.at_least(f"{name}, {size} blocks: hits of ours / Belady's", GOAL, mine / best))


def mooncake(path: Path) -> list[Prompt]:
    """A Mooncake trace. Raises FileNotFoundError."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return [Prompt(int(row["arrival_s"] * 1000), tuple(row["block_hashes"])) for row in rows]


def spread(prompts: Sequence[Prompt], grid_ms: int) -> list[Prompt]:
    """The same prompts in the same order; those of one time of a grid, spread evenly until its next one."""
    found = list[Prompt]()
    for at_ms, group in itertools.groupby(prompts, key=lambda prompt: prompt.at_ms):
        together = list(group)
        found += [
            Prompt(at_ms + number * grid_ms // len(together), prompt.blocks) for number, prompt in enumerate(together)
        ]
    return found


def coding(path: Path, sessions: int) -> list[Prompt]:
    """The first sessions, each started at a random time of an hour (seeded). Raises FileNotFoundError."""
    chance, starts, prompts = random.Random(1), dict[int, float](), list[Prompt]()
    csv.field_size_limit(10**9)
    with gzip.open(path, "rt") as lines:
        for row in csv.DictReader(lines):
            session = int(row["session_id"])
            if session >= sessions:
                continue
            start = starts.setdefault(session, chance.uniform(0, SESSION_START_S))
            blocks = tuple(session << 32 | block for block in _runs(row["block_runs"]))
            prompts.append(Prompt(int((start + float(row["t_s"])) * 1000), blocks))
    return sorted(prompts, key=lambda prompt: prompt.at_ms)


def _runs(text: str) -> Iterator[int]:
    for run_text in text.split():
        first, _, last = run_text.partition("-")
        yield from range(int(first), int(last or first) + 1)


def ours(prompts: Sequence[Prompt], size: int) -> int:
    """Hits of the block table."""
    table, hits = BlockTable(SlotArena(size * LENGTH, LENGTH, LENGTH), "benchmark"), 0
    for prompt in prompts:
        keys = [block.to_bytes(8) for block in prompt.blocks]
        found = table.acquire(SALT, keys, HOLDER, prompt.at_ms)
        have = 0
        if isinstance(found, Acquired):
            hits += (have := len(found.blocks))
        new = NewBlocks(SALT, MODEL, keys[have - 1] if have else ROOT, tuple(keys[have:]), LENGTH)
        reserved = table.reserve(new, HOLDER, prompt.at_ms) if new.keys else None
        if isinstance(reserved, Reserved):
            table.commit(reserved.lease_id, [WrittenBlock(slot.key, 1, 1) for slot in reserved.slots], prompt.at_ms)
        if isinstance(found, Acquired):
            table.release(found.lease_id, prompt.at_ms)
        while table.make_room(MAKE_ROOM, prompt.at_ms):  # as the service does in the background
            pass
    return hits


def lru(prompts: Sequence[Prompt], size: int) -> int:
    """Hits of the least-recently-used rule."""
    order, hits = OrderedDict[int, None](), 0
    for prompt in prompts:
        hits += _leading(prompt, order)
        for block in reversed(prompt.blocks):
            order[block] = None
            order.move_to_end(block)
        while len(order) > size:
            order.popitem(last=False)
    return hits


def belady(prompts: Sequence[Prompt], size: int) -> int:
    """Hits of Belady's rule; among blocks that are used next at the same time, the deepest goes first."""
    uses: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for block in prompt.blocks:
            uses.setdefault(block, []).append(number)
    for numbers in uses.values():
        numbers.reverse()
    here: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits, never = 0, len(prompts)
    for prompt in prompts:
        hits += _leading(prompt, here)
        for depth, block in enumerate(prompt.blocks):
            uses[block].pop()
            here[block] = uses[block][-1] if uses[block] else never
            heapq.heappush(heap, (-here[block], -depth, block))
        while len(here) > size:
            next_use, _, block = heapq.heappop(heap)
            if here.get(block) == -next_use:
                del here[block]
    return hits


def _leading(prompt: Prompt, here: OrderedDict[int, None] | dict[int, int]) -> int:
    for number, block in enumerate(prompt.blocks):
        if block not in here:
            return number
    return len(prompt.blocks)

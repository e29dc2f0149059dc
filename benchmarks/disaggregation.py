"""What long prompts and loads do to running streams: two nodes that do everything, against one for prompts and one that
decodes. `python -m benchmarks disaggregation [--no-mesh] [--seconds 9]`

The real meshes (reference engine, CPU) are `benchmarks.split_mesh`, what decode waits for is `benchmarks.handover`.

In the simulation production code decides (`FairQueue.take` with its seats), an engine is a loop of steps: one token for
each running stream and at most a chunk of prompts. Costs of an 8-billion-parameter model in 16 bit on an 80 GB card,
all guesses from its figures: a step reads 16 GB at 2 TB/s and has 2 ms of overhead = 10 ms; a prompt token computes
16 GFLOP, 10,000 a second = 0.1 ms; its KV is 131 kB (32 layers, 8 heads of 128, K and V), over 25 GB/s = 5 us.
"""

import argparse
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.handover import handed_over
from benchmarks.report import Figure, Goal, Report
from benchmarks.split_mesh import SPLIT_MOST, on_meshes
from benchmarks.streams import quantile
from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Offer,
    Part,
    Progress,
    QueueEntry,
    Room,
    Ticket,
    Tokens,
    instance_key,
    version_key,
)

NAME = "disaggregation"
DESCRIPTION = "inter-token latency of running streams beside long prompts and loads: mixed against split nodes"

STEP_MS, TOKEN_MS, CHUNK, TRANSFER_US, HANDOFF_US = 10.0, 0.1, 512, 5, 10_000
STREAMS, PROMPT, PROMPTS_PER_S, ANSWER, SIMULATED_MS = 16, 4_000, 1.0, 200, 120_000
IMPORT_STEPS_MS = 0.5  # a step while blocks come in: copies beside the compute
VERSION = version_key("m", "sha256:1")


@dataclass(slots=True)
class Running:
    """A request inside an engine."""

    attempt: AttemptId
    prompt_left: int
    output_left: int
    last_ms: float | None = None
    counted: bool = False  # one of the streams whose gaps are looked at


@dataclass(slots=True)
class Engine:
    """One instance: steps until nothing runs."""

    offer: Offer
    running: list[Running] = field(default_factory=list)
    importing: int = 0
    busy_until_ms: float = 0.0


@dataclass(slots=True)
class Simulation:
    """Engines, the production queue, and the gaps of the counted streams."""

    engines: list[Engine]
    prompts_per_s: float
    queue: FairQueue = field(default_factory=FairQueue)
    gaps_ms: list[float] = field(default_factory=list)
    first_tokens_ms: list[float] = field(default_factory=list)
    submitted: dict[AttemptId, float] = field(default_factory=dict)
    handed_over: int = 0
    count: int = 0

    def run(self) -> None:
        """Counted streams from the start, prompts from a second on, until the time is over."""
        chance = random.Random(1)
        now, next_prompt = 0.0, 1_000.0
        for _ in range(STREAMS):
            self._submit(64, SIMULATED_MS, now)
        while now < SIMULATED_MS:
            if self.prompts_per_s and now >= next_prompt:
                self._submit(PROMPT, ANSWER, now)
                next_prompt += chance.expovariate(self.prompts_per_s / 1000)
            self._grant(now)
            for engine in self.engines:
                if engine.busy_until_ms <= now:
                    self._step(engine, now)
            ends = [each.busy_until_ms for each in self.engines if each.busy_until_ms > now]
            now = min([*ends, next_prompt] if self.prompts_per_s else ends, default=SIMULATED_MS)

    def _submit(self, tokens: int, output: int, now: float) -> None:
        self.count += 1
        attempt = AttemptId(f"r{self.count}/1")
        entry = QueueEntry(attempt, TenantId("t"), VERSION, PriorityClass.STANDARD, tokens, output, SIMULATED_MS * 10)
        self.queue.enqueue(entry, Room(10_000, 1), int(now))
        self.submitted[attempt] = now

    def _grant(self, now: float) -> None:
        for ticket in self.queue.take([engine.offer for engine in self.engines], 64, int(now)).granted:
            number = int(ticket.attempt[1:].split("/")[0])
            counted = number <= STREAMS
            output = SIMULATED_MS if counted else ANSWER
            prompt = 64 if counted else PROMPT
            place = ticket.prefill_place or ticket.place
            self.handed_over += bool(ticket.prefill_place)
            engine = next(each for each in self.engines if each.offer.place == place)
            one = 1 if ticket.prefill_place else output
            engine.running.append(Running(ticket.attempt, prompt, one, counted=counted))
            self._awaiting[ticket.attempt] = ticket

    _awaiting: dict[AttemptId, Ticket] = field(default_factory=dict)

    def _step(self, engine: Engine, now: float) -> None:
        """One step of an engine; what it produces is there at its end."""
        if not engine.running:
            return
        budget, took = CHUNK, STEP_MS
        for each in engine.running:
            part = min(each.prompt_left, budget)
            each.prompt_left -= part
            budget -= part
            took += part * TOKEN_MS
        if engine.importing > 0:
            took += IMPORT_STEPS_MS
            engine.importing -= 1
        end = engine.busy_until_ms = now + took
        for each in [each for each in engine.running if each.prompt_left == 0]:
            self._token(engine, each, end)

    def _token(self, engine: Engine, each: Running, end: float) -> None:
        if each.last_ms is not None and each.counted and end > 2_000:
            self.gaps_ms.append(end - each.last_ms)
        if each.last_ms is None and not each.counted and each.attempt in self.submitted:
            self.first_tokens_ms.append(end - self.submitted.pop(each.attempt))
        each.last_ms = end
        each.output_left -= 1
        if each.output_left > 0:
            return
        engine.running.remove(each)
        ticket = self._awaiting[each.attempt]
        if ticket.prefill_place == engine.offer.place:
            self.queue.renew([Progress(each.attempt, Tokens(PROMPT, 0, 1))], int(end))
            decode = next(other for other in self.engines if other.offer.place == ticket.place)
            decode.importing += max(1, round(PROMPT * TRANSFER_US / 1000 / STEP_MS))
            decode.running.append(Running(each.attempt, 0, ANSWER - 1, last_ms=end))
            return
        self.queue.finish(Ending(each.attempt, Outcome.DONE, Tokens(PROMPT, 0, ANSWER), 1), int(end))


def engines(split: bool) -> list[Engine]:
    """Two instances of one speed."""
    parts = (Part.PREFILL, Part.DECODE) if split else (Part.WHOLE, Part.WHOLE)
    return [
        Engine(
            Offer(
                instance_key(NodeId(f"n{number}"), VERSION),
                VERSION,
                64,
                f"n{number}".encode(),
                part,
                round(TOKEN_MS * 1000) + (TRANSFER_US if part is Part.PREFILL else 0),
                0,
                HANDOFF_US if part is Part.PREFILL else 0,
            )
        )
        for number, part in enumerate(parts)
    ]


def simulated(figures: dict[str, Figure], goals: list[Goal]) -> None:
    """Both layouts, with and without prompts."""
    quiet = Simulation(engines(split=True), 0.0)
    quiet.run()
    base = quantile(quiet.gaps_ms, 0.99)
    figures["simulated_quiet_itl_p99_ms"] = round(base, 2)
    for name, split in (("mixed", False), ("split", True)):
        world = Simulation(engines(split), PROMPTS_PER_S)
        world.run()
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            figures[f"simulated_{name}_itl_{label}_ms"] = round(quantile(world.gaps_ms, share), 2)
        figures[f"simulated_{name}_first_token_p50_ms"] = round(quantile(world.first_tokens_ms, 0.5), 1)
        figures[f"simulated_{name}_handed_over"] = world.handed_over
        figures[f"simulated_{name}_prompts"] = len(world.first_tokens_ms)
    split_p99 = float(figures["simulated_split_itl_p99_ms"])
    goals.append(
        Goal.at_most("simulated: inter-token p99, split / an unloaded decode node", SPLIT_MOST, split_p99 / base)
    )


def run(arguments: Sequence[str]) -> Report:
    """The simulation, the hand-over, then both meshes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks disaggregation", description=DESCRIPTION)
    parser.add_argument("--no-mesh", action="store_true", help="only the simulation")
    parser.add_argument("--seconds", type=float, default=9.0, help="of each kind of phase on the mesh (default 9)")
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    goals: list[Goal] = []
    simulated(figures, goals)
    handed_over(figures, goals)
    if not options.no_mesh:
        with tempfile.TemporaryDirectory(prefix="rh-split-") as folder:
            on_meshes(Path(folder), options.seconds, figures, goals)
    return Report(NAME, figures, {}, goals)

"""Streams on real meshes beside long prompts and loads: two nodes that do everything, against one for prompts and one
that decodes. Part of `python -m benchmarks disaggregation`.

Two streams decode; then long prompts arrive beside them; then a cold model is loaded and unloaded again and again
beside them. Inter-token latency is taken at the client from the gaps between pieces. On one machine a node for prompts
takes the cores of the one that decodes, which no split can help; so for prompts, where there are cores enough, the
first one belongs to the decoding node, the gateway and the client, and the others to everything else, as on machines of
their own. A load happens on the decoding node, which then has all cores. What is shared all the same (memory, caches,
the host under a virtual machine) is measured in the same run: the split mesh beside a process of no mesh that computes
as many prompts, or starts and loads the model as often (`benchmarks.beside`). Phases take turns, so that a machine
whose speed changes meanwhile changes all of them. Where the decoding node's time goes is told by the processor time
of each part beside the streams.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.mesh import BenchmarkMesh, benchmark_mesh
from benchmarks.processes import cpu_seconds_by_group
from benchmarks.report import Figure, Goal
from benchmarks.streams import quantile
from deploy.local.child import group_members
from deploy.local.parts import ClusterOptions, Profile
from tests.builders.checkpoints import random_checkpoint

TENANT = "bench"
SPLIT_MOST = 1.2
WORDS = 150
DECODE_SIDE = ("triton-2", "kvstore-2", "loader-2", "gateway")  # of the split mesh; its first node is for prompts
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "context_tokens": 2048,
}


ROUNDS = 3
MEASURED_PARTS = ("triton-2", "kvstore-2", "loader-2", "gateway")


@dataclass(slots=True)
class Phase:
    """Gaps between the pieces of all streams of a phase, ms, and how often something was done beside them."""

    gaps_ms: list[float] = field(default_factory=list)
    done: int = 0
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)  # of each part

    def add(self, more: "Phase") -> None:
        """Another turn of it."""
        self.gaps_ms += more.gaps_ms
        self.done += more.done
        self.seconds += more.seconds
        self.cpu_s = {name: self.cpu_s.get(name, 0.0) + used for name, used in more.cpu_s.items()}

    @property
    def p99(self) -> float:
        """Of the gaps."""
        return quantile(self.gaps_ms, 0.99)


def catalogue_in(root: Path) -> Path:
    """A model that everybody uses and one that is cold."""
    models = [
        {
            "name": name,
            "source": {"path": str(random_checkpoint(root / name, number, **SHAPE))},
            "engine": "reference",
            "interface": "llm",
            "slots": 8,
            "memory": {"device": "24MiB", "kv_pool_tokens": 12_000},
            "price": {"id": "bench", "output": "1"},
        }
        for number, name in enumerate(("llm", "cold"))
    ]
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "tenants": [{"name": TENANT}], "models": models}, sort_keys=False))
    return path


class Client:
    """Streams with the times of their pieces."""

    def __init__(self, session: aiohttp.ClientSession, mesh: BenchmarkMesh) -> None:
        self._session = session
        self._url = f"{mesh.http_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {mesh.keys[TENANT]}", "Content-Type": "application/json"}

    async def stream(self, model: str, words: int, max_tokens: int, phase: Phase | None = None) -> None:
        """One request; its gaps are added to `phase`. Raises AssertionError if it fails."""
        text = f"{random.random()} " + "railway " * words  # no two prompts share blocks
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        last: float | None = None
        async with self._session.post(self._url, data=json.dumps(body), headers=self._headers) as response:
            assert response.status == 200, f"{response.status}: {(await response.text())[:300]}"
            async for line in response.content:
                if line.startswith(b'data: {"') and b'"content":"' in line:
                    now = time.perf_counter()
                    if last is not None and phase is not None:
                        phase.gaps_ms.append((now - last) * 1000)
                    last = now


async def _phase(
    mesh: BenchmarkMesh, client: Client, seconds: float, beside: Callable[[], Awaitable[None]] | None
) -> Phase:
    """Two streams one after the other all the time, and something beside them."""
    before = cpu_seconds_by_group(mesh.process_groups)
    phase, began = Phase(), time.perf_counter()
    stop = began + seconds

    async def streams() -> None:
        while time.perf_counter() < stop:
            await client.stream("llm", 4, 400, phase)

    async def other() -> None:
        while beside is not None and time.perf_counter() < stop:
            await beside()
            phase.done += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(streams())
        tasks.create_task(other())
    phase.seconds = time.perf_counter() - began
    after = cpu_seconds_by_group(mesh.process_groups)
    phase.cpu_s = {name: after[name] - before[name] for name in MEASURED_PARTS}
    return phase


@asynccontextmanager
async def _beside(what: str, folder: Path, phase: Phase, cores: set[int]) -> AsyncIterator[None]:
    """A process that does as much as was done beside the streams of `phase`."""
    per_second = max(phase.done, 1) / phase.seconds
    arguments = ("-m", "benchmarks.beside", what, str(folder), str(8 * WORDS), str(per_second))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        _pin(process.pid, cores)
        yield
    finally:
        process.stdin.close()
        await process.wait()


def _cores() -> tuple[set[int], set[int]]:
    """Those of the decoding side, and the others; all for both where there is one only."""
    found = sorted(os.sched_getaffinity(0))
    return ({found[0]}, set(found[1:])) if len(found) > 1 else (set(found), set(found))


def _pin(process: int, cores: set[int]) -> None:
    """Every thread that there is; those to come are like those that make them."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), cores)
        except ProcessLookupError:
            continue  # it has ended


def _pin_mesh(mesh: BenchmarkMesh, decode: set[int], others: set[int]) -> None:
    for part, group in mesh.process_groups.items():
        for process in group_members(group):
            _pin(process, decode if part in DECODE_SIDE else others)
    _pin(os.getpid(), decode)


async def _on_mesh(root: Path, profile: Profile, seconds: float, figures: dict[str, Figure]) -> dict[str, Phase]:
    options = ClusterOptions(
        nodes=2, http_port=0, grpc_port=0, admin_port=0, cluster="bench", log_level="warning", profile=profile
    )
    timeout = aiohttp.ClientTimeout(total=120)
    everything = os.sched_getaffinity(0)
    decode, others = _cores()
    catalogue = root / "catalogue.yaml"
    async with benchmark_mesh(options, catalogue) as mesh, aiohttp.ClientSession(timeout=timeout) as session:
        client = Client(session, mesh)
        await asyncio.gather(*(client.stream("llm", WORDS, 8) for _ in range(4)))
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not await _everywhere(mesh):  # both nodes take part
            await client.stream("llm", WORDS, 8)

        async def prompts() -> None:
            await client.stream("llm", WORDS, 2)

        async def loads() -> None:
            await client.stream("cold", 1, 1)
            await mesh.admin.unload("cold")

        found: dict[str, Phase] = {}
        try:
            for name, act, here, there in (
                ("prompts", prompts, decode, others),
                ("loads", loads, everything, everything),
            ):
                _pin_mesh(mesh, here, there)
                for _ in range(ROUNDS):
                    quiet = await _phase(mesh, client, seconds / ROUNDS, None)
                    found.setdefault(f"before_{name}", Phase()).add(quiet)
                    beside = await _phase(mesh, client, seconds / ROUNDS, act)
                    found.setdefault(name, Phase()).add(beside)
                    if profile is Profile.DISAGGREGATED:
                        async with _beside(name, root / "llm", beside, there):
                            bare = await _phase(mesh, client, seconds / ROUNDS, None)
                        found.setdefault(f"bare_{name}", Phase()).add(bare)
            figures[f"mesh_{profile.value}_blocks_brought"] = await _blocks_brought(session, mesh)
        finally:
            _pin(os.getpid(), everything)
        for name, phase in found.items():
            for share, label in ((0.5, "p50"), (0.99, "p99")):
                figures[f"mesh_{profile.value}_{name}_itl_{label}_ms"] = round(quantile(phase.gaps_ms, share), 2)
            figures[f"mesh_{profile.value}_{name}_done"] = phase.done
            for part, used in phase.cpu_s.items():
                share = used / phase.seconds
                figures[f"mesh_{profile.value}_{name}_cpu_share_{part.replace('-', '_')}"] = round(share, 3)
        return found


async def _blocks_brought(session: aiohttp.ClientSession, mesh: BenchmarkMesh) -> int:
    """Blocks that the second node's kvstore has taken from the first one's: how much was handed over."""
    port = next(part.ops_port for part in mesh.cluster.plan.parts if part.name == "kvstore-2")
    async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return int(sum(float(line.split()[1]) for line in lines if line.startswith("roundhouse_kv_peer_fetched_total ")))


async def _everywhere(mesh: BenchmarkMesh) -> bool:
    nodes = await mesh.admin.nodes()
    return all(any((each["model"], each["state"]) == ("llm", "ready") for each in node["instances"]) for node in nodes)


def on_meshes(root: Path, seconds: float, figures: dict[str, Figure], goals: list[Goal]) -> None:
    """Both layouts; the goals are of the split one."""
    catalogue_in(root)
    for profile in (Profile.MIXED, Profile.DISAGGREGATED):
        found = asyncio.run(_on_mesh(root, profile, seconds, figures))
    for name in ("prompts", "loads"):
        quiet = found[f"before_{name}"].p99
        ratio = found[name].p99 / quiet
        goals.append(Goal.at_most(f"mesh: inter-token p99 beside {name}, split / split without", SPLIT_MOST, ratio))
        figures[f"mesh_split_{name}_against_quiet"] = round(ratio, 3)
        figures[f"mesh_bare_{name}_against_quiet"] = round(found[f"bare_{name}"].p99 / quiet, 3)
        what = f"mesh: inter-token p99 beside {name}, split / split beside the bare work in no mesh"
        goals.append(Goal.at_most(what, SPLIT_MOST, found[name].p99 / found[f"bare_{name}"].p99))

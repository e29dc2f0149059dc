"""Weights on their way: cold disk to host memory, host memory to what an engine can read, and source to verified disk.

Each figure stands beside the limit measured in the same run, for the same files: direct reads with a deep queue into
the same memory without any of our code, and a memory copy. Cold = pushed out of the page cache before each measurement.
Beside it what others do: a plain copy into memory, the `safetensors` library, and Run:ai's streamer if an interpreter
has it (`--streamer-python`). The way onto a GPU is not measured.
"""

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.report import Goal, Report
from benchmarks.staging_rivals import copy_plainly, load_safetensors, run_streamer
from engines.reference.mapped_weights import MappedFiles, read_mapped
from roundhouse.catalogue.digests import version_digest, version_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import SystemClock
from services.loader.adapters.direct_io import CHUNK_BYTES
from services.loader.adapters.disk_cache import DiskCache
from services.loader.adapters.shared_arena import PAGE_BYTES, READS_AT_ONCE, SharedArena
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import Filling, StageRequest

NAME = "staging"
DESCRIPTION = (
    "weights from cold disk to host memory to the engine, against direct reads, memory copies and other loaders"
)
SHARDS = 4  # as many as a small checkpoint has
MEGABYTE = 1_000_000
TENSOR_BYTES = 4 * 1024 * 1024
AT_ONCE = (1, 4)
RANDOM_TENSORS = 16  # 64 MiB: more than a processor's cache
LARGE_MEGABYTES = 2_000  # from here on one measurement is long enough
SPARE_BYTES = 2_000_000_000
GOAL_OF_DISK, GOAL_OF_MEMORY = 0.9, 0.8
GOAL_OF_RIVALS = 1.1
GOAL_CPU_SHARE = 1 / 3
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


def run(arguments: Sequence[str]) -> Report:
    """Medians over the rounds, for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks staging")
    parser.add_argument(
        "--megabytes", type=int, nargs="+", default=[64, 512, 4_000], help="sizes of a model (default 64 512 4000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (default 3; large models 1)")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the system's)")
    parser.add_argument("--memory", type=Path, default=SHARED_MEMORY, help="a memory file system (default /dev/shm)")
    parser.add_argument("--streamer-python", type=Path, default=None, help="interpreter with runai-model-streamer")
    options = parser.parse_args(arguments)
    figures: dict[str, float | int | str] = {}
    limits: dict[str, float | int | str] = {}
    goals: list[Goal] = []
    for megabytes in options.megabytes:
        with (
            tempfile.TemporaryDirectory(dir=options.folder) as disk,
            tempfile.TemporaryDirectory(dir=options.memory) as memory,
        ):
            together = [count for count in AT_ONCE if not (reason := what_lacks(megabytes, count, Path(disk), memory))]
            if reason:
                figures[f"{megabytes}MB_x{AT_ONCE[-1]}_skipped"] = reason
            if not together:
                continue
            rounds = 1 if megabytes >= LARGE_MEGABYTES else options.rounds
            bench = _Bench(Path(disk), Path(memory), megabytes, rounds, together)
            bench.measure(options.streamer_python)
            figures.update(bench.figures)
            limits.update(bench.limits)
            goals += bench.goals
    return Report(NAME, figures, limits, goals)


def what_lacks(megabytes: int, together: int, disk: Path, memory: str | Path) -> str:
    """Why so many models of that size cannot be measured here; empty = they can.

    On disk they lie once, and one of them a second time in the cache; in memory they lie in the arena, and one of them
    a second time as a copy. Two gigabytes of each are left to others."""
    size = megabytes * MEGABYTE
    needs, left = (together + 1) * size + SPARE_BYTES, shutil.disk_usage(disk).free
    if needs > left:
        return f"{needs / 1e9:.1f} GB of disk are needed, {left / 1e9:.1f} GB are free"
    left = min(_memory_available(), shutil.disk_usage(memory).free)
    if needs > left:
        return f"{needs / 1e9:.1f} GB of memory are needed, {left / 1e9:.1f} GB are available"
    return ""


def _memory_available() -> int:
    """What the kernel would give without swapping (`MemAvailable`, proc(5))."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


@dataclass(frozen=True, slots=True)
class _Took:
    rate: float  # GB/s
    cpu: float  # processor seconds a GB, of all threads, user and system


class _Bench:
    """One size: as many models of it on disk as are read at once, an arena for all of them."""

    def __init__(self, disk: Path, memory: Path, megabytes: int, rounds: int, together: Sequence[int]) -> None:
        self.figures: dict[str, float | int | str] = {}
        self.limits: dict[str, float | int | str] = {}
        self.goals: list[Goal] = []
        self._label = f"{megabytes}MB"
        self._rounds = rounds
        self._together = together
        self._disk = disk
        self._memory = memory
        self._models = [_make(disk / f"model-{number}", megabytes) for number in range(together[-1])]
        self._size = sum(path.stat().st_size for path in self._models[0])
        source = self._models[0][0].parent
        self._digest = version_digest(source)
        self._files = tuple(
            ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in version_entries(source)
        )
        self._arena = SharedArena(memory / "arena", together[-1] * (self._size + SHARDS * PAGE_BYTES))

    def measure(self, streamer: Path | None) -> None:
        """Everything, the limit beside each figure."""
        asyncio.run(self._arena.start())
        fresh = self._turns({"fresh": lambda: asyncio.run(self._fill(1))}, rounds=1)["fresh"]
        self.figures[f"{self._label}_first_touch_gb_per_second"] = fresh.rate
        asyncio.run(self._arena.fault_in())
        for together in self._together:
            self._to_host(together)
        self._to_engine()
        self._to_disk()
        self._rivals(streamer)
        self._arena.close()

    def _to_host(self, together: int) -> None:
        label = f"{self._label}_x{together}"
        works = {
            "limit": lambda: self._read_direct(together),
            "ours": lambda: asyncio.run(self._fill(together)),
        }
        took = self._turns(works, together)
        self._note(f"{label}_disk_to_host", took["ours"])
        self._note(f"{label}_direct_read", took["limit"], self.limits)
        share = took["ours"].rate / took["limit"].rate
        self.goals.append(Goal.at_least(f"{label} disk to host / direct read", GOAL_OF_DISK, share))

    def _to_engine(self) -> None:
        """Map the ranges and read every byte once, against copying them once: what a loader without an arena does."""
        asyncio.run(self._fill(1))  # the reads of the limit went over it
        files = self._fillings(0)
        mapped = MappedFiles(str(self._arena.path), {file.path.name: (file.offset, file.size) for file in files})
        target = np.ones(self._size, np.uint8)

        def read_all() -> None:
            for name in mapped.files:
                for tensor in read_mapped(mapped, name).values():
                    tensor.view(np.uint64).max()

        def copy_all() -> None:
            with self._arena.path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory:
                for file in files:
                    whole = np.frombuffer(memory, np.uint8, file.size, file.offset)
                    np.copyto(target[: file.size], whole)
                    del whole

        began = time.perf_counter()
        tensors = [read_mapped(mapped, name) for name in mapped.files]
        self.figures[f"{self._label}_host_to_engine_map_ms"] = (time.perf_counter() - began) * 1000
        del tensors
        took = self._turns({"limit": copy_all, "ours": read_all}, warm=True)
        self._note(f"{self._label}_host_to_engine", took["ours"])
        self._note(f"{self._label}_memory_copy", took["limit"], self.limits)
        share = took["ours"].rate / took["limit"].rate
        self.goals.append(Goal.at_least(f"{self._label} host to engine / memory copy", GOAL_OF_MEMORY, share))

    def _to_disk(self) -> None:
        """From the source, hashed, to the cache: bound by SHA-256 and by the second write, so no goal of this page."""
        cache = self._disk / "cache"
        took = self._turns({"stage": lambda: asyncio.run(self._stage())}, after=lambda: shutil.rmtree(cache))
        self._note(f"{self._label}_source_to_disk", took["stage"])

    def _rivals(self, streamer: Path | None) -> None:
        """In turns with ours, because the machine is shared; the best of them is the one to beat."""
        shards, copy = self._models[0], self._memory / "copy"
        works: dict[str, Callable[[], object]] = {
            "ours": lambda: asyncio.run(self._fill(1)),
            "plain_copy": lambda: copy_plainly(shards, copy),
            "safetensors": lambda: load_safetensors(shards),
        }
        if streamer is not None:
            works["runai_streamer"] = lambda: run_streamer(streamer, shards[0].parent)
        took = self._turns(works, after=lambda: shutil.rmtree(copy, ignore_errors=True))
        ours = took.pop("ours")
        for name, each in took.items():
            self._note(f"{self._label}_{name}", each)
        best = max(took, key=lambda name: took[name].rate)
        self.goals.append(Goal.at_least(f"{self._label} ours / {best}", GOAL_OF_RIVALS, ours.rate / took[best].rate))
        share = ours.cpu / took[best].cpu
        self.goals.append(Goal.at_most(f"{self._label} processor, ours / {best}", GOAL_CPU_SHARE, share))

    def _note(self, name: str, took: "_Took", where: "dict[str, float | int | str] | None" = None) -> None:
        kept = self.figures if where is None else where
        kept[f"{name}_gb_per_second"] = took.rate
        kept[f"{name}_cpu_seconds_per_gb"] = took.cpu

    def _turns(
        self,
        works: Mapping[str, Callable[[], object]],
        together: int = 1,
        *,
        rounds: int = 0,
        warm: bool = False,
        after: Callable[[], object] = lambda: None,
    ) -> "dict[str, _Took]":
        """Each work once a round, the first one last in the next round, because a virtual disk may have a cache of its
        own behind it: medians. A work that returns (wall, processor) timed itself."""
        gigabytes = together * self._size / 1e9
        walls: dict[str, list[float]] = defaultdict(list)
        cpus: dict[str, list[float]] = defaultdict(list)
        order = list(works.items())
        for _ in range(rounds or self._rounds):
            order.append(order.pop(0))
            for name, work in order:
                if not warm:
                    for model in self._models[:together]:
                        _make_cold(model)
                began, used = time.perf_counter(), time.process_time()
                own = work()
                wall, cpu = time.perf_counter() - began, time.process_time() - used
                if isinstance(own, tuple):
                    wall, cpu = own
                walls[name].append(wall)
                cpus[name].append(cpu)
                after()
        median = statistics.median
        return {name: _Took(gigabytes / median(walls[name]), median(cpus[name]) / gigabytes) for name in works}

    async def _fill(self, together: int) -> None:
        traffic = Traffic()

        async def one(model: int) -> None:
            with traffic.lane(Priority.DEMAND) as lane:
                await self._arena.fill(self._fillings(model), lane, lambda _: None)

        fills: list[Awaitable[None]] = [one(model) for model in range(together)]
        await asyncio.gather(*fills)

    def _fillings(self, model: int) -> list[Filling]:
        begin = model * (self._arena.capacity // self._together[-1] // PAGE_BYTES) * PAGE_BYTES
        files = []
        for shard in self._models[model]:
            size = shard.stat().st_size
            files.append(Filling(shard, size, begin))
            begin += -(-size // PAGE_BYTES) * PAGE_BYTES
        return files

    def _read_direct(self, together: int) -> None:
        """Nothing but reads, as many threads and as large parts, into the same memory: the arena's pages."""
        shards = [shard for model in self._models[:together] for shard in model]
        parts = [(shard, begin) for shard in shards for begin in range(0, shard.stat().st_size, CHUNK_BYTES)]
        descriptors = {shard: os.open(shard, os.O_RDONLY | os.O_DIRECT) for shard in shards}
        with self._arena.path.open("r+b") as opened, mmap.mmap(opened.fileno(), self._arena.capacity) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)
            places = self._arena.capacity // CHUNK_BYTES

            def read(number: int) -> None:
                shard, begin = parts[number]
                first = number % places * CHUNK_BYTES
                with memoryview(memory) as whole, whole[first : first + CHUNK_BYTES] as view:
                    os.preadv(descriptors[shard], [view], begin)

            with ThreadPoolExecutor(together * READS_AT_ONCE) as threads:
                list(threads.map(read, range(len(parts))))
        for descriptor in descriptors.values():
            os.close(descriptor)

    async def _stage(self) -> None:
        source = self._models[0][0].parent
        cache = DiskCache(self._disk / "cache", SystemClock())
        await cache.start()
        request = StageRequest(str(source), self._digest, self._files, self._size)
        try:
            with Traffic().lane(Priority.DEMAND) as lane:
                await cache.stage(request, lane, lambda _: None)
        finally:
            cache.close()


def _make(folder: Path, megabytes: int) -> list[Path]:
    """Shards in the safetensors format, of random content so that no file system makes them smaller.

    The randomness is that of a few tensors, each with a number of its own before it: gigabytes of it would take longer
    than what is measured."""
    folder.mkdir()
    tensors = max(1, megabytes * MEGABYTE // SHARDS // TENSOR_BYTES)
    shape = [1024, TENSOR_BYTES // 4096]
    header = json.dumps(
        {
            f"layer.{number}": {
                "dtype": "F32",
                "shape": shape,
                "data_offsets": [number * TENSOR_BYTES, (number + 1) * TENSOR_BYTES],
            }
            for number in range(tensors)
        }
    ).encode()
    header += b" " * (-(8 + len(header)) % 64)
    content = [os.urandom(TENSOR_BYTES) for _ in range(RANDOM_TENSORS)]
    shards = [folder / f"model-{number}.safetensors" for number in range(SHARDS)]
    for shard in shards:
        with shard.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for number in range(tensors):
                file.write(os.urandom(16) + content[number % RANDOM_TENSORS][16:])
            file.flush()
            os.fsync(file.fileno())
    return shards


def _make_cold(shards: list[Path]) -> None:
    for path in shards:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

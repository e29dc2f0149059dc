"""Weights from a cold disk to the loader's verified cache: GB/s against the limits measured in the same run.

The limit is a direct sequential read of the same files by as many threads as the copy uses: what the disk gives if
nothing is hashed and nothing written. Staging also hashes and writes to disk and syncs, so it can not reach that here;
a plain copy with the same sync and one thread stands beside it. The source is pushed out of the page cache before each
measurement. It does not measure the way to the device.
"""

import argparse
import asyncio
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.report import Goal, Report
from roundhouse.catalogue.digests import version_digest
from roundhouse.clock import SystemClock
from roundhouse.vocabulary import Digest
from services.loader.adapters.disk_cache import DiskCache

NAME = "staging"
DESCRIPTION = "weights from cold disk to the verified cache, against plain copy and direct reads"
FILES = 4  # shards of a model; as many as a small checkpoint has
BLOCK_BYTES = 4 * 1024 * 1024
MEGABYTE = 1_000_000
GOAL_OF_LIMIT = 0.9  # what is asked of a way from disk to memory; this way also writes, so it is not expected to be met
GOAL_OF_COPY = 1.1  # to be worth its code; a plain copy verifies nothing


def run(arguments: Sequence[str]) -> Report:
    """Measure one size; medians over the rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks staging")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the model (default 256)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind (default 3)")
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure (default: the system's)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        return _measure(Path(name), options.megabytes, options.rounds)


def _measure(folder: Path, megabytes: int, rounds: int) -> Report:
    source = folder / "source"
    size = _make(source, megabytes)
    digest = version_digest(source)
    seconds: dict[str, list[float]] = {"direct": [], "copy": [], "stage": []}
    processor: dict[str, list[float]] = {"direct": [], "copy": [], "stage": []}
    for _ in range(rounds):
        for kind, work in (
            ("direct", lambda: _read_direct(source)),
            ("copy", lambda: _copy(source, folder / "copy")),
            ("stage", lambda: asyncio.run(_stage(source, folder / "cache", digest, size))),
        ):
            _make_cold(source)
            wall, used = _timed(work)
            seconds[kind].append(wall)
            processor[kind].append(used)
            for written in ("copy", "cache"):
                shutil.rmtree(folder / written, ignore_errors=True)
    rate = {kind: size / 1e9 / statistics.median(values) for kind, values in seconds.items()}
    cost = {kind: statistics.median(values) / (size / 1e9) for kind, values in processor.items()}
    figures: dict[str, float | int | str] = {
        "model_bytes": size,
        "staged_gb_per_second": rate["stage"],
        "plain_copy_gb_per_second": rate["copy"],
        "staged_cpu_seconds_per_gb": cost["stage"],
        "plain_copy_cpu_seconds_per_gb": cost["copy"],
    }
    limits = {"direct_read_gb_per_second": rate["direct"], "direct_read_cpu_seconds_per_gb": cost["direct"]}
    goals = [
        Goal.at_least("staged / direct read", GOAL_OF_LIMIT, rate["stage"] / rate["direct"]),
        Goal.at_least("staged / plain copy", GOAL_OF_COPY, rate["stage"] / rate["copy"]),
    ]
    return Report(NAME, figures, limits, goals)


def _make(source: Path, megabytes: int) -> int:
    """Random content, so that no file system makes it smaller; whole blocks, as direct reads want."""
    source.mkdir()
    blocks = max(1, megabytes * MEGABYTE // FILES // BLOCK_BYTES)
    for number in range(FILES):
        with (source / f"shard-{number}").open("wb") as file:
            for _ in range(blocks):
                file.write(os.urandom(BLOCK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    return FILES * blocks * BLOCK_BYTES


def _make_cold(source: Path) -> None:
    for path in source.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds, of all threads, user and system."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def _read_direct(source: Path) -> None:
    with ThreadPoolExecutor(FILES) as threads:
        list(threads.map(_read_one, source.iterdir()))


def _read_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, BLOCK_BYTES) as block:
            while os.readv(descriptor, [block]):
                pass
    finally:
        os.close(descriptor)


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in target.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


async def _stage(source: Path, folder: Path, digest: Digest, size: int) -> None:
    cache = DiskCache(folder, SystemClock())
    await cache.start()
    try:
        await cache.stage(str(source), digest, size_max=size, on_bytes=lambda _: None)
    finally:
        cache.close()

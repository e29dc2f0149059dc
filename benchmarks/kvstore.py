"""Bytes a second into and out of the kvstore, from memory and disk, against plain copies and reads of the same run.

A put is the engines' own writer (`engines.block_writer`): reserve, copy into the arena with a checksum, commit. A get
acquires, copies each block to where it is needed, checks what it copied and releases; a check does so without the copy,
which an engine makes anyway when it fills its own pool, and a seal is a put by an engine that has computed its blocks
in place. All are real calls to a real process. The limit of memory is plain copies of the same sizes into and out of a
mapped, touched shared file, by the same processes in the same round; with several clients all copy at once, and the
time is that from the first start to the last end. The ratio that counts is the median of the rounds' ratios. Beside it,
what a copy and a checksum in two passes reach (`checked_copy_*`). The limit of the disk is direct reads of the same
sizes into memory of the arena's kind, by as many clients and with as many threads each as the store reads with
(`kv_disk`). With `--memory-folder` on a tmpfs that was mounted with `huge=advise` all shared memory, ours and that of
the limits, is in huge pages; else it nearly always is not. A check by several clients comes right after a get, and so
shares the cores with the store's writing of what the get has earned (docs/decisions/0165). Redis is Valkey over TCP
with GET and SET, without its append-only file; `--lmcache-python` and `--mooncake-python` name interpreters that have
these stores.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from benchmarks.kv_clients import Case, kvstore_client, redis_client, rounds_of
from benchmarks.kv_disk import disk_rates, turns_of
from benchmarks.kv_first_token import first_token_figures
from benchmarks.kv_lookups import lookup_figures
from benchmarks.kv_process import SHARED_MEMORY, kvstore_running
from benchmarks.kv_rivals import NAMES, run_rival
from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.server import LocalServer
from deploy.local.stores import valkey_program

NAME = "kvstore"
DESCRIPTION = "put and get GB/s from memory and disk, against memory copies and direct reads"

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256 * KIB, MIB, 4 * MIB)
CLIENTS = (1, 4)
GOALS = {"put": 0.75, "get": 0.9, "check": 0.9, "disk_get": 0.75}
LIMITS = {"put": "copy_in", "get": "copy_out", "check": "copy_out", "disk_get": "direct_read"}
NOT_OURS = {*LIMITS.values(), "checked_copy_in", "checked_copy_out", "direct_read_1_thread"}


def run(arguments: Sequence[str]) -> Report:
    """Measure every size with every number of clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kvstore")
    parser.add_argument("--client-bytes", type=int, default=64 * MIB, help="bytes of one client and round: one prompt")
    for rival in NAMES:
        parser.add_argument(f"--{rival}-python", type=Path, default=None, help=f"an interpreter that has {rival}")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; the median counts")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="of a block, bytes")
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), help="processes at once")
    parser.add_argument("--folder", type=Path, default=None, help="where the disk to be measured is")
    parser.add_argument(
        "--memory-folder",
        type=Path,
        default=SHARED_MEMORY,
        help="where arenas lie: a tmpfs with huge pages, or /dev/shm",
    )
    parser.add_argument("--no-redis", action="store_true", help="leave Valkey out")
    parser.add_argument("--parts", nargs="+", choices=["throughput", "lookups", "first-token"], help="default: all")
    parser.add_argument(
        "--lookup-blocks", type=int, nargs="+", default=[10**4, 10**5, 10**6], help="blocks in the store"
    )
    options = parser.parse_args(arguments)
    figures: dict[str, Figure] = {}
    limits: dict[str, Figure] = {}
    goals: list[Goal] = []
    parts = options.parts or ["throughput", "lookups", "first-token"]
    with tempfile.TemporaryDirectory(prefix="rh-bench-", dir=options.folder) as name:
        if "lookups" in parts:
            figures |= lookup_figures(Path(name), options.lookup_blocks)
        if "first-token" in parts:
            figures |= first_token_figures(Path(name))
        if "throughput" not in parts:
            return Report(NAME, figures, limits, goals)
        for size in options.sizes:
            for clients in options.clients:
                _case(Path(name), size, clients, options, figures, limits, goals)
    return Report(NAME, figures, limits, goals)


def _case(
    folder: Path,
    size: int,
    clients: int,
    options: argparse.Namespace,
    figures: dict[str, Figure],
    limits: dict[str, Figure],
    goals: list[Goal],
) -> None:
    label, nbytes, rounds = f"{size // KIB}kib_{clients}", options.client_bytes, options.repeats
    with ExitStack() as stack:
        chains = clients * max(2, turns_of(clients)) + 1  # what is stored at once, and a little room
        memory = options.memory_folder
        address, restart = stack.enter_context(kvstore_running(folder, chains * nbytes, memory_folder=memory))
        case = Case(address, size, nbytes, rounds, memory)
        rates = rounds_of(clients, nbytes, kvstore_client, (case,))
        rates |= disk_rates(case, clients, restart, folder)
        for name, values in rates.items():
            (limits if name in NOT_OURS else figures)[f"{label}_{name}_gb_per_second"] = statistics.median(values)
        if not options.no_redis:
            port = stack.enter_context(_valkey(folder))
            for name, values in rounds_of(clients, nbytes, redis_client, (port, size, nbytes, rounds)).items():
                figures[f"{label}_{name}_gb_per_second"] = statistics.median(values)
        if clients == 1:
            _rivals(label, size, options, figures)
    for name, limit in LIMITS.items():
        ratio = statistics.median(ours / plain for ours, plain in zip(rates[name], rates[limit], strict=True))
        goals.append(Goal.at_least(f"{label}: {name} / its limit", GOALS[name], ratio))


def _rivals(label: str, size: int, options: argparse.Namespace, figures: dict[str, Figure]) -> None:
    for name in NAMES:
        python: Path | None = getattr(options, f"{name}_python")
        if python is None:
            continue
        first, second = free_ports(2)
        rates = run_rival(python, name, size, options.client_bytes, options.repeats, (first, second))
        if isinstance(rates, str):
            figures[f"{label}_{name}_skipped"] = rates
            continue
        figures |= {f"{label}_{name}_{what}_gb_per_second": rate for what, rate in rates.items()}


# Parts


@contextmanager
def _valkey(folder: Path) -> Iterator[int]:
    (port,) = free_ports(1)
    server = LocalServer(valkey_program("valkey", port, folder / "valkey", folder / "valkey.log"))
    server.start()
    try:
        with redis.Redis(port=port) as client:
            client.config_set("appendonly", "no")  # a cache, as ours is
        yield port
    finally:
        server.stop()

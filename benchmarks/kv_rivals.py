"""Other stores of KV blocks, for the `kvstore` benchmark: LMCache's CPU backend and the Mooncake store, by one client.

Both are used as their own engines use them: LMCache in the engine's process, allocate, copy in, publish; look up, copy
out; Mooncake with registered buffers, its own segment in the client's process, and its master beside it. Neither looks
at the bytes when it gives them out. `python benchmarks/kv_rivals.py NAME ...` runs in whatever interpreter has that
store, and must not import this project.
"""

import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 240
MASTER_S = 30.0  # at most, until it listens
NAMES = ("lmcache", "mooncake")

Rates = dict[str, float]


def run_rival(python: Path, name: str, size: int, nbytes: int, repeats: int, ports: tuple[int, int]) -> Rates | str:
    """GB a second of put and get, the median of the turns; or why there are none."""
    command = [str(python), str(Path(__file__).resolve()), name, *map(str, (size, nbytes, repeats, *ports))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name} did not run: {type(error).__name__}"
    if done.returncode:
        return f"{name} did not run: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}"
    rates: Rates = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


# In the other interpreter


def _play(
    put: Callable[[str, int], None], get: Callable[[str, int], None], size: int, nbytes: int, repeats: int
) -> Rates:
    puts, gets = list[float](), list[float]()
    for turn in range(repeats):
        began = time.perf_counter()
        for at in range(0, nbytes, size):
            put(f"{turn}-{at}", at)
        middle = time.perf_counter()
        for at in range(0, nbytes, size):
            get(f"{turn}-{at}", at)
        puts.append(nbytes / (middle - began) / 1e9)
        gets.append(nbytes / (time.perf_counter() - middle) / 1e9)
    return {"put": statistics.median(puts), "get": statistics.median(gets)}


def _lmcache(size: int, nbytes: int, repeats: int) -> Rates:
    torch: Any = importlib.import_module("torch")
    config: Any = importlib.import_module("lmcache.v1.config")
    backends: Any = importlib.import_module("lmcache.v1.storage_backend.local_cpu_backend")
    memory: Any = importlib.import_module("lmcache.v1.memory_management")
    key_of: Any = importlib.import_module("lmcache.utils").CacheEngineKey
    metadata: Any = importlib.import_module("lmcache.v1.metadata").LMCacheMetadata(
        model_name="m",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(1, 2, 256, size // (256 * 2 * 128 * 2), 128),
    )
    torch.set_num_threads(1)
    limit = 1.5 * (repeats + 1) * nbytes / 2**30
    store = backends.LocalCPUBackend(
        config.LMCacheEngineConfig.from_defaults(chunk_size=256, local_cpu=True, max_local_cpu_size=limit), metadata
    )
    source = torch.from_numpy(np.random.default_rng(1).integers(0, 255, nbytes, np.uint8))
    target, shape = torch.zeros(nbytes, dtype=torch.uint8), torch.Size([2, 1, 256, size // 512])

    def put(name: str, at: int) -> None:
        place = store.allocate(shape, torch.uint8, memory.MemoryFormat.KV_2LTD)
        place.tensor.view(-1).copy_(source[at : at + size])
        store.submit_put_task(key_of("m", 1, 0, hash(name), torch.bfloat16), place)
        place.ref_count_down()

    def get(name: str, at: int) -> None:
        place = store.get_blocking(key_of("m", 1, 0, hash(name), torch.bfloat16))
        target[at : at + size].copy_(place.tensor.view(-1))
        place.ref_count_down()

    rates = _play(put, get, size, nbytes, repeats)
    assert bool((source == target).all())
    store.close()
    return rates


def _wait_until_listening(port: int) -> None:
    ends = time.monotonic() + MASTER_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.05)  # between two looks at another process
        else:
            return


def _mooncake(size: int, nbytes: int, repeats: int, port: int, other_port: int) -> Rates:
    module: Any = importlib.import_module("mooncake.store")
    program = Path(module.__file__).with_name("mooncake_master")
    command = [str(program), f"--rpc_port={port}", f"--metrics_port={other_port}"]
    master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_listening(port)
        store = module.MooncakeDistributedStore()
        room = 2 * (repeats + 1) * nbytes
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", room, 1 << 28, "tcp", "", f"127.0.0.1:{port}") == 0
        source = np.random.default_rng(1).integers(0, 255, nbytes, np.uint8)
        target = np.zeros(nbytes, np.uint8)
        assert store.register_buffer(source.ctypes.data, nbytes) == 0
        assert store.register_buffer(target.ctypes.data, nbytes) == 0

        def put(name: str, at: int) -> None:
            assert store.put_from(name, source.ctypes.data + at, size) == 0

        def get(name: str, at: int) -> None:
            assert store.get_into(name, target.ctypes.data + at, size) == size

        rates = _play(put, get, size, nbytes, repeats)
        assert bool((source == target).all())
        return rates
    finally:
        master.kill()
        master.wait()


def _main(name: str, *numbers: str) -> None:
    size, nbytes, repeats, port, other_port = map(int, numbers)
    rates = _lmcache(size, nbytes, repeats) if name == NAMES[0] else _mooncake(size, nbytes, repeats, port, other_port)
    sys.stdout.write("\n" + json.dumps(rates) + "\n")
    sys.stdout.flush()
    os._exit(0)  # their threads do not always end


if __name__ == "__main__":
    _main(*sys.argv[1:])

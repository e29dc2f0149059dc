"""The bare work of a prefill node or of a load, in a process that belongs to no mesh: what this machine's shared parts
(cores, memory, caches) cost a stream by themselves.

`python -m benchmarks.beside prompts|loads FOLDER TOKENS PER_SECOND` runs until its standard input ends.
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path


def main() -> None:
    """See the module."""
    what, folder, tokens, per_second = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    work = _prompts(folder, tokens) if what == "prompts" else _load(folder)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    due = time.monotonic()
    while not over.is_set():
        work()
        due = max(due + 1 / per_second, time.monotonic())
        over.wait(due - time.monotonic())


def _prompts(folder: str, tokens: int) -> Callable[[], None]:
    from tests.unit.engines.engine_driver import make_request, open_model, run_requests

    model = open_model(Path(folder), kv_pool_tokens=12_000)
    prompt = [5 + place * 7 % 240 for place in range(tokens)]

    def run() -> None:
        run_requests(model, [make_request(model, prompt, max_tokens=1)])

    return run


def _load(folder: str) -> Callable[[], None]:
    code = (
        "import sys; from engines.reference.loaded_model import load_model;"
        "load_model({'weights_path': sys.argv[1], 'slots': '8', 'kv_pool_tokens': '12000'})"
    )

    def run() -> None:
        subprocess.run([sys.executable, "-c", code, folder], check=True)

    return run


if __name__ == "__main__":
    main()

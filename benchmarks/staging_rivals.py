"""Other ways to bring a model's shards from disk into memory, for the `staging` benchmark: none of them is ours.

`python -m benchmarks.staging_rivals FOLDER` runs the streamer of Run:ai in whatever interpreter has it, and prints wall
and processor seconds; it must not import this project.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

STREAMER_LIMIT_S = 600


def copy_plainly(shards: list[Path], target: Path) -> None:
    """`cp` into a memory file system: buffered reads, fresh pages."""
    target.mkdir()
    for shard in shards:
        with shard.open("rb") as source, (target / shard.name).open("wb") as copy:
            while block := source.read(8 * 1024 * 1024):
                copy.write(block)


def load_safetensors(shards: list[Path]) -> None:
    """The format's own library: all tensors as NumPy arrays."""
    from safetensors.numpy import load_file

    for shard in shards:
        load_file(shard)


def run_streamer(python: Path, folder: Path) -> tuple[float, float]:
    """Seconds (wall, processor) of runai-model-streamer in its own interpreter, without its start and imports.

    Raises CalledProcessError."""
    command = [str(python), str(Path(__file__).resolve()), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=STREAMER_LIMIT_S)
    wall, processor = json.loads(done.stdout.splitlines()[-1])
    return float(wall), float(processor)


def _stream(folder: Path) -> None:
    from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found,import-untyped,unused-ignore]

    shards = [str(path) for path in sorted(folder.glob("*.safetensors"))]
    started, used = time.perf_counter(), time.process_time()
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(shards)
        for _name, _tensor in streamer.get_tensors():
            pass
    sys.stdout.write(json.dumps([time.perf_counter() - started, time.process_time() - used]) + "\n")


if __name__ == "__main__":
    _stream(Path(sys.argv[1]))

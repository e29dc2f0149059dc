"""A real Triton with its vLLM backend over vLLM's CPU build, put together from parts that no wheel brings together.

The backend's sources (`model.py` and `utils/` of triton-inference-server/vllm_backend, as they go with the vLLM used)
are in the folder that ROUNDHOUSE_TRITON_VLLM_BACKEND names. They run unchanged behind a shim that does what NVIDIA's
container does by its build, and gives vLLM the arguments that a CPU needs and a GPU does not.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.infra import TritonServer
from tests.integration.vllm.running import PYTHON, ROOT

BACKEND = Path(os.environ.get("ROUNDHOUSE_TRITON_VLLM_BACKEND", "/nowhere"))
MARKS = [
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM has no environment here: make test-vllm makes it"),
    pytest.mark.skipif(
        not (BACKEND / "model.py").is_file(),
        reason="Triton's vLLM backend is not here: ROUNDHOUSE_TRITON_VLLM_BACKEND names the folder with its model.py",
    ),
    pytest.mark.timeout(1_800),
]

_SHIM = """\
import importlib.util, locale, os, sys
locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
paths = {paths!r}
sys.path[:] = paths + [each for each in sys.path if "site-packages" not in each]
os.environ.update(PYTHONPATH=os.pathsep.join(paths), VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
spec = importlib.util.spec_from_file_location("vllm_backend_model", {model!r})
backend = sys.modules["vllm_backend_model"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backend)
HERE = dict(dtype="float32", enforce_eager=True, block_size=32, max_model_len=512, distributed_executor_backend="uni")
arguments = backend.AsyncEngineArgs
backend.AsyncEngineArgs = lambda **given: arguments(**{{**given, **HERE}})
TritonPythonModel = backend.TritonPythonModel
"""


@contextmanager
def triton_with_vllm(folder: Path) -> Iterator[TritonServer]:
    """A running Triton whose backend `vllm` is the real one."""
    server = TritonServer(folder)
    backends = folder / "backends"
    for link in list((backends / "python").iterdir()):  # a backend that another one runs on must not be a link
        source = link.resolve()
        link.unlink()
        shutil.copy2(source, link)
    (backends / "vllm").mkdir()
    (backends / "vllm" / "model.py").write_text(_shim(folder))
    server.start()
    try:
        yield server
    finally:
        server.kill()


def _shim(folder: Path) -> str:
    """NumPy is this project's: the wheel's stub was built before NumPy 2 and reads its arrays wrongly."""
    numpy, site = folder / "numpy", Path(sysconfig.get_paths()["purelib"])
    numpy.mkdir()
    for name in ("numpy", "numpy.libs"):
        (numpy / name).symlink_to(site / name)
    version = f"python{sysconfig.get_python_version()}"
    vllm = PYTHON.parent.parent / "lib" / version / "site-packages"
    paths = [str(BACKEND), str(numpy), str(ROOT), str(vllm)]
    return _SHIM.format(paths=paths, model=str(BACKEND / "model.py"))


def children(of: int, called: Callable[[str], bool]) -> list[int]:
    """Processes below `of` whose command line is `called` so, with theirs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, ValueError):
            continue
        if parent == of:
            pid = int(entry.name)
            found += [pid] if called(command) else []
            found += children(pid, called)
    return found

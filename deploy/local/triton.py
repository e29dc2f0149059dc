"""Triton Inference Server from the `nvidia-pytriton` wheel, as one node's server.

The wheel brings the server, the Python backend and one stub for each Python version; the backend folder that Triton
wants is assembled from links. Models come and go by explicit control only. Readiness is not strict: a model that is
broken must not make the whole node look broken (case B18), so callers ask for the readiness of a model.
Decision: docs/decisions/0060-embedded-triton.md.
"""

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from deploy.local.child import Command
from deploy.local.probes import http_probe
from deploy.local.server import PartFailed, Program
from roundhouse.environment import child_environment

PROJECT_ROOT = Path(__file__).resolve().parents[2]
EXIT_TIMEOUT_S = 5  # how long Triton waits for running inferences at SIGTERM; the mesh has drained before


@dataclass(frozen=True, slots=True)
class TritonPorts:
    """Where one server listens, all on one host."""

    grpc: int
    http: int
    metrics: int


def triton_program(
    name: str, ports: TritonPorts, folder: Path, log: Path, *, shared_memory_prefix: str, host: str = "127.0.0.1"
) -> Program:
    """A Triton server without models. `folder` gets `models/` (the repository) and `backends/`.

    `shared_memory_prefix` must differ for each server of the machine. Raises PartFailed if the wheel or libpython is
    missing."""
    site = Path(sysconfig.get_paths()["purelib"])
    home = _wheel_home()
    environment = _environment(site)
    require_libpython(environment)
    models = folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    argv = [
        str(home / "bin" / "tritonserver"),
        f"--model-repository={models}",
        "--model-control-mode=explicit",
        f"--backend-directory={assemble_backends(home, folder / 'backends')}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
        "--disable-auto-complete-config",
        "--strict-readiness=false",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--http-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-address={host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-port={ports.metrics}",
        *_GRPC_KEEPALIVE,
    ]
    return Program(
        name,
        Command(argv, log, environment=environment),
        partial(http_probe, ports.http, "/v2/health/ready"),
        ports.grpc,
        ready_within_s=30.0,
        grace_s=EXIT_TIMEOUT_S + 3.0,
        shared_memory_prefix=shared_memory_prefix,
    )


_GRPC_KEEPALIVE = (
    # Our channels ping every 10 s while a call is open, also when no token flows (roundhouse.grpc_edge); Triton's
    # default takes pings closer than 5 minutes for abuse and closes the connection.
    "--grpc-http2-min-recv-ping-interval-without-data=5000",
    "--grpc-keepalive-permit-without-calls=1",
    "--grpc-http2-max-ping-strikes=0",
)


def _wheel_home() -> Path:
    spec = find_spec("pytriton")
    home = Path(spec.origin).parent / "tritonserver" if spec is not None and spec.origin else None
    if home is None or not (home / "bin" / "tritonserver").exists():
        raise PartFailed("tritonserver is missing: pip install 'roundhouse[embedded]'")
    return home


def python_version() -> str:
    """The version that picks the stub, such as 3.11."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def assemble_backends(home: Path, folder: Path) -> Path:
    """Link the Python backend and the stub of the running Python under `folder`. Idempotent."""
    stub = home / "python_backend_stubs" / python_version() / "triton_python_backend_stub"
    if not stub.exists():
        known = ", ".join(sorted(entry.name for entry in (home / "python_backend_stubs").iterdir()))
        raise PartFailed(f"Triton's Python backend has no stub for Python {python_version()} (it has {known})")
    target = folder / "python"
    target.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (home / "backends" / "python").iterdir() if path.is_file()]
    for source in [*sources, stub]:
        link = target / source.name
        if not (link.is_symlink() and link.readlink() == source):
            link.unlink(missing_ok=True)
            link.symlink_to(source)
    return folder


def _environment(site: Path) -> dict[str, str]:
    libraries = [str(site / "nvidia_pytriton.libs")]
    own = Path(str(sysconfig.get_config_var("LIBDIR")))
    if (own / _libpython()).exists():
        libraries.append(str(own))
    return {
        "LD_LIBRARY_PATH": ":".join(libraries),
        # Paths from PYTHONPATH get no .pth processing, so an editable install is named itself.
        "PYTHONPATH": f"{PROJECT_ROOT}:{site}",
        "OPENBLAS_NUM_THREADS": "1",  # models share the cores; a thread pool in each would fight
        "OMP_NUM_THREADS": "1",
    }


def _libpython() -> str:
    return f"libpython{python_version()}.so.1.0"


def require_libpython(environment: dict[str, str]) -> None:
    """Raise PartFailed if Triton's Python stub could not load libpython: its first load would hang otherwise."""
    ask = [sys.executable, "-I", "-S", "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", _libpython()]
    answer = subprocess.run(ask, env=child_environment(environment), check=False, capture_output=True, timeout=30)
    if answer.returncode != 0:
        raise PartFailed(
            f"{_libpython()} is missing, which Triton's Python backend needs. On Debian and Ubuntu:"
            f" apt-get install libpython{python_version()}"
        )

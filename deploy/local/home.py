"""The folder of one embedded cluster: where its data, logs, secrets and running state lie, and who may use it now.

    HOME/layout            version of this arrangement
    HOME/secrets.json      admin key and demo keys, readable by the owner only
    HOME/data/             nats/ valkey/ ledger.sqlite3 nodes/NODE/ models/
    HOME/logs/PART.log
    HOME/run/lock          held by the running cluster; the kernel lets go when it dies
    HOME/run/state.json    pids with start times, ports

Invariant: whoever holds the lock owns the folder. Files are replaced by renaming complete ones: no reader sees half.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

LAYOUT = "1"


class ClusterProblem(Exception):
    """Why the cluster cannot do what was asked, in words for the person who asked."""


class AlreadyRunning(ClusterProblem):
    """Another process runs this folder's cluster."""


class PartState(msgspec.Struct, kw_only=True):
    """One part of the running cluster."""

    name: str
    pid: int
    start_ticks: int  # with the pid: this process and no later one
    port: int
    ops_port: int = 0  # 0 = no /health/ready of ours
    started_unix_ms: int = 0
    restarts: int = 0


class ClusterState(msgspec.Struct, kw_only=True):
    """What a running cluster says of itself in run/state.json."""

    pid: int
    start_ticks: int
    started_unix_ms: int
    http_port: int
    grpc_port: int
    admin_port: int
    nats_url: str = ""
    redis_url: str = ""
    ready: bool = False
    parts: list[PartState] = []


class Secrets(msgspec.Struct, kw_only=True):
    """Keys of the embedded cluster. The demo keys are kept so that a second start can print them again."""

    admin_key: str
    tenant_keys: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Home:
    """The paths of one cluster's folder."""

    root: Path

    @property
    def data(self) -> Path:
        """What must survive a restart."""
        return self.root / "data"

    @property
    def models(self) -> Path:
        """The generated demo models and their catalogue."""
        return self.data / "models"

    @property
    def state_file(self) -> Path:
        """Pids and ports of the running cluster."""
        return self.root / "run" / "state.json"

    @property
    def secrets_file(self) -> Path:
        """Keys, mode 0600."""
        return self.root / "secrets.json"

    @property
    def shared_memory_prefix(self) -> str:
        """What the names in /dev/shm of this cluster begin with: the same for each run on this folder."""
        return f"rh-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}-"

    def log(self, part: str) -> Path:
        """Log of a part."""
        return self.root / "logs" / f"{part}.log"

    def node(self, node_id: str) -> Path:
        """Data folder of a node."""
        return self.data / "nodes" / node_id

    def prepare(self) -> None:
        """Make the folder, or check that its layout is ours. Raises ClusterProblem."""
        layout = self.root / "layout"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            found = layout.read_text().strip() if layout.exists() else None
            if found is None and self.data.exists():
                found = "unknown"
            if found not in (None, LAYOUT):
                raise ClusterProblem(
                    f"{self.root} has the data layout {found!r} and this version writes {LAYOUT!r}:"
                    f" move the folder away or choose another with --data-dir"
                )
            for folder in (self.data, self.root / "logs", self.root / "run"):
                folder.mkdir(exist_ok=True)
            replace_file(layout, LAYOUT.encode() + b"\n")
        except OSError as error:
            raise ClusterProblem(f"cannot use the folder {self.root}: {error.strerror}") from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the folder while the context is open. Raises AlreadyRunning."""
        handle = os.open(self.root / "run" / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyRunning(self._running_text()) from error
            yield
        finally:
            os.close(handle)

    def is_locked(self) -> bool:
        """Whether a cluster runs on this folder now."""
        if not (self.root / "run" / "lock").exists():
            return False
        try:
            with self.locked():
                return False
        except AlreadyRunning:
            return True

    def _running_text(self) -> str:
        state = self.read_state()
        where = f" at http://127.0.0.1:{state.http_port} (pid {state.pid})" if state is not None else ""
        return f"Roundhouse is already running{where}; its folder is {self.root}"

    def read_state(self) -> ClusterState | None:
        """The last written state; None if there is none or it cannot be read."""
        try:
            return msgspec.json.decode(self.state_file.read_bytes(), type=ClusterState)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_state(self, state: ClusterState) -> None:
        """Replace the state."""
        replace_file(self.state_file, msgspec.json.encode(state))

    def read_secrets(self) -> Secrets | None:
        """The kept keys; None if there are none. Raises ClusterProblem if the file is broken."""
        try:
            return msgspec.json.decode(self.secrets_file.read_bytes(), type=Secrets)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise ClusterProblem(f"{self.secrets_file} cannot be read ({error}); remove it to make new keys") from error

    def write_secrets(self, secrets: Secrets) -> None:
        """Replace the kept keys, readable by the owner only."""
        replace_file(self.secrets_file, msgspec.json.format(msgspec.json.encode(secrets)), mode=0o600)


def replace_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a complete file beside `path` and rename it over it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

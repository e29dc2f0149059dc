"""The parts of an embedded cluster: which programs, on which ports, with which settings.

Pure but for the port draw and the folders that the programs want. Each service runs as in production, as
`python -m services.NAME` with the environment that docs/operators/settings would give it; nothing is shared in memory.
"""

import hashlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import partial
from pathlib import Path
from shutil import disk_usage

from deploy.local.child import Command
from deploy.local.home import Home
from deploy.local.overrides import Override, chosen_for
from deploy.local.ports import free_ports
from deploy.local.probes import first_reason, http_probe, listening_probe
from deploy.local.server import Probe, Program
from deploy.local.stores import nats_program, valkey_program
from deploy.local.triton import TritonPorts, triton_program

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


class Tier(IntEnum):
    """Order of the ends: a part stops before those of lower tiers, which it uses."""

    STORE = 0
    ENGINE = 1
    MEMORY = 2
    NODE = 3
    SCHEDULER = 4
    EDGE = 5


@dataclass(frozen=True, slots=True)
class Part:
    """One program with its place in the cluster. `program.probe` says that it serves, `ready` that it can work."""

    program: Program
    tier: Tier
    ready: Probe
    ops_port: int = 0
    hung_after_s: float = 30.0  # no answer to `program.probe` for so long: killed and started again; a guess

    @property
    def name(self) -> str:
        """Name in displays, logs and restarts."""
        return self.program.name


class Profile(StrEnum):
    """What the nodes do."""

    MIXED = "mixed"  # every node runs requests whole
    DISAGGREGATED = "disaggregated"  # the first half of the nodes runs prompts, the others decode


KV_DISK_BYTES = 256 * 2**20  # of a node's KV blocks: four arenas; small, since it is somebody's laptop


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What can be chosen about an embedded cluster. Sizes in bytes; port 0 picks a free one."""

    nodes: int = 2
    device_bytes: int = 96 * 2**20  # eight demo models of the mean size (12 MiB) beside each other on a node
    host_bytes: int = 256 * 2**20
    disk_bytes: int = 4 * 2**30
    arena_bytes: int = 64 * 2**20
    http_port: int = 8080
    grpc_port: int = 8081
    admin_port: int = 8082
    cluster: str = "local"
    log_level: str = "info"
    drain_seconds: int = 10
    ledger_url: str = ""  # empty = SQLite in the cluster's folder
    profile: Profile = Profile.MIXED
    overrides: tuple[Override, ...] = ()
    redis_url: str = ""  # empty = a Valkey of the cluster's own


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Every part, and the addresses that others need."""

    parts: tuple[Part, ...]
    http_port: int
    grpc_port: int
    admin_port: int
    nats_url: str
    redis_url: str

    @property
    def http_url(self) -> str:
        """Where clients call."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def admin_url(self) -> str:
        """Where operators call."""
        return f"http://127.0.0.1:{self.admin_port}"


@dataclass(frozen=True, slots=True)
class _Addresses:
    """What every service is told."""

    nats_url: str
    redis_url: str


def plan_cluster(home: Home, options: ClusterOptions, admin_key: str) -> ClusterPlan:
    """Lay out a cluster. Raises PartFailed if a program is missing."""
    nats_port, valkey_port, *metering_ports = free_ports(4)
    redis_url = options.redis_url or f"redis://127.0.0.1:{valkey_port}/0"
    addresses = _Addresses(f"nats://127.0.0.1:{nats_port}", redis_url)
    edge = _edge_ports(options)
    stores = [nats_program("nats", nats_port, home.data / "nats", home.log("nats"))]
    if not options.redis_url:
        stores.append(valkey_program("valkey", valkey_port, home.data / "valkey", home.log("valkey")))
    maker = _ServiceMaker(home, options, addresses)
    parts = [Part(program, Tier.STORE, program.probe) for program in stores]
    tritons = [TritonPorts(*free_ports(3)) for _ in range(options.nodes)]
    parts += maker.metering(metering_ports, tritons)
    for number, triton in enumerate(tritons, start=1):
        parts += maker.node(f"node-{number}", number, triton)
    disaggregated = options.profile is Profile.DISAGGREGATED
    scheduler = {"DISAGGREGATE": "true"} if disaggregated else {}
    parts.append(maker.service("scheduler", "scheduler", Tier.SCHEDULER, 0, scheduler))
    parts.append(maker.gateway(edge, admin_key, metering_ports))
    return ClusterPlan(tuple(parts), *edge, addresses.nats_url, addresses.redis_url)


def _edge_ports(options: ClusterOptions) -> tuple[int, int, int]:
    chosen = (options.http_port, options.grpc_port, options.admin_port)
    spare = iter(free_ports(3))
    http, grpc, admin = (port or next(spare) for port in chosen)
    return http, grpc, admin


class _ServiceMaker:
    """Makes parts that run our own services."""

    def __init__(self, home: Home, options: ClusterOptions, addresses: _Addresses) -> None:
        self._home = home
        self._options = options
        self._addresses = addresses

    def service(self, service: str, name: str, tier: Tier, port: int, settings: dict[str, str]) -> Part:
        """A part that runs `python -m services.<service>`. `port` 0 shows the ops port instead."""
        (ops_port,) = free_ports(1)
        given = {
            "CLUSTER": self._options.cluster,
            "INSTANCE_ID": name,
            "NATS_URL": self._addresses.nats_url,
            "REDIS_URL": self._addresses.redis_url,
            "OPS_PORT": str(ops_port),
            "LOG_LEVEL": self._options.log_level,
            "DRAIN_SECONDS": str(self._options.drain_seconds),
            **settings,
            **chosen_for(service, self._options.overrides),
        }
        environment = {
            "PYTHONUNBUFFERED": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **{f"ROUNDHOUSE_{key}": value for key, value in given.items()},
        }
        command = Command([sys.executable, "-m", f"services.{service}"], self._home.log(name), environment)
        program = Program(
            name,
            command,
            partial(http_probe, ops_port, "/health/live"),
            port or ops_port,
            ready_within_s=60.0,
            grace_s=self._options.drain_seconds + 5.0,
        )
        return Part(program, tier, partial(http_probe, ops_port, "/health/ready"), ops_port)

    def metering(self, ports: Sequence[int], tritons: Sequence[TritonPorts]) -> list[Part]:
        """Metering on a SQLite ledger, unless the options name another."""
        settings = {
            "LEDGER_URL": self._options.ledger_url or f"sqlite:///{self._home.data / 'ledger.sqlite3'}",
            "HTTP_PORT": str(ports[0]),
            "GRPC_PORT": str(ports[1]),
            "ENGINE_METRICS_URLS": " ".join(f"http://127.0.0.1:{triton.metrics}/metrics" for triton in tritons),
        }
        return [self.service("metering", "metering", Tier.MEMORY, ports[0], settings)]

    def gateway(self, edge: tuple[int, int, int], admin_key: str, metering_ports: Sequence[int]) -> Part:
        """The gateway, with the bootstrap admin key's hash."""
        http, grpc, admin = edge
        settings = {
            "HTTP_PORT": str(http),
            "GRPC_PORT": str(grpc),
            "ADMIN_PORT": str(admin),
            "ADMIN_KEY_HASH": hashlib.sha256(admin_key.encode()).hexdigest(),
            "METERING_URL": f"http://127.0.0.1:{metering_ports[0]}",
            "METERING_GRPC": f"127.0.0.1:{metering_ports[1]}",
            "OUTBOX_DIR": str(self._home.data / "outbox"),
        }
        part = self.service("gateway", "gateway", Tier.EDGE, http, settings)
        # It is alive before it has connected to its stores; it serves when its ports do.
        serves = partial(first_reason, part.program.probe, *(partial(listening_probe, port) for port in edge))
        return replace(part, program=replace(part.program, probe=serves))

    def node(self, node_id: str, number: int, triton: TritonPorts) -> Iterator[Part]:
        """Triton, kvstore and loader of one node."""
        kvstore_port, loader_port = free_ports(2)
        engine = triton_program(
            f"triton-{number}",
            triton,
            self._home.node(node_id) / "triton",
            self._home.log(f"triton-{number}"),
            shared_memory_prefix=f"{self._home.shared_memory_prefix}t{number}-",
        )
        yield Part(engine, Tier.ENGINE, engine.probe)
        arena = {
            "NODE_ID": node_id,
            "GRPC_PORT": str(kvstore_port),
            "ARENA_PATH": str(self._arena(node_id, "arena", self._options.arena_bytes)),
            "ARENA_BYTES": str(self._options.arena_bytes),
            "DATA_DIR": str(self._home.node(node_id) / "blocks"),
            "DISK_BYTES": str(KV_DISK_BYTES),
            "DISK_SEGMENT_BYTES": str(KV_DISK_BYTES // 16),
        }
        yield self.service("kvstore", f"kvstore-{number}", Tier.MEMORY, kvstore_port, arena)
        loader = {
            "NODE_ID": node_id,
            "GRPC_PORT": str(loader_port),
            "TRITON_GRPC": f"127.0.0.1:{triton.grpc}",
            # The loader keeps an empty folder there for each model: Triton's index lists only names that have one.
            "TRITON_REPOSITORY": str(self._home.node(node_id) / "triton" / "models"),
            "KVSTORE_ADDRESS": f"127.0.0.1:{kvstore_port}",
            "DEVICE_BYTES": str(self._options.device_bytes),
            "HOST_BYTES": str(self._options.host_bytes),
            "HOST_ARENA": str(self._arena(node_id, "weights", self._options.host_bytes)),
            "DISK_BYTES": str(self._options.disk_bytes),
            "CACHE_DIR": str(self._home.node(node_id) / "cache"),
            "NODE_ROLE": self._role(number),
        }
        yield self.service("loader", f"loader-{number}", Tier.NODE, loader_port, loader)

    def _role(self, number: int) -> str:
        if self._options.profile is Profile.MIXED:
            return "mixed"
        return "prefill" if number <= max(1, self._options.nodes // 2) else "decode"

    def _arena(self, node_id: str, name: str, size: int) -> Path:
        """Shared memory where there is enough of it, else a file on disk."""
        wanted = 2 * size * self._options.nodes  # as much again for Triton's own segments
        if SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > wanted:
            return SHARED_MEMORY / f"{self._home.shared_memory_prefix}{name}-{node_id}"
        return self._home.node(node_id) / name

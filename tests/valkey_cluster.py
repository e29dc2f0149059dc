"""A real Valkey cluster on this machine: three primaries, each with a replica, from the wheel's program.

Nodes are killed and started again like other servers of tests; slots are moved with the commands an operator would use.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from deploy.local.child import Command
from deploy.local.ports import free_ports
from deploy.local.probes import redis_probe
from deploy.local.server import Program
from deploy.local.stores import valkey_program
from tests import infra

PRIMARIES = 3
NODE_TIMEOUT_MS = 2_000  # a failover takes about twice as long; less would see failures on a machine that is only busy
READY_WITHIN_S = 60.0


class ValkeyNode(infra.ProgramServer):
    """One node. `ask` sends it a command, whatever slots it has."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (self.bus_port,) = free_ports(1)
        super().__init__(self._program, "redis://127.0.0.1:{port}/0", folder)

    def _program(self, port: int, folder: Path) -> Program:
        log = folder / "valkey.log"
        plain = valkey_program(f"valkey-{port}", port, folder / "data", log)
        options = {
            "cluster-enabled": "yes",
            "cluster-port": str(self.bus_port),
            "cluster-node-timeout": str(NODE_TIMEOUT_MS),
            "cluster-replica-validity-factor": "0",
            "repl-diskless-sync-delay": "0",
        }
        argv = [*plain.command.argv, *(part for name, value in options.items() for part in (f"--{name}", value))]
        return Program(f"valkey-{port}", Command(argv, log), lambda: redis_probe(port), port)

    def ask(self, *command: str | int) -> Any:
        """The answer as redis-py gives it. Raises RedisError."""
        with Redis(port=self.port, socket_timeout=10, decode_responses=True) as client:
            return cast("Any", client).execute_command(*command)

    @property
    def id(self) -> str:
        """Its name among the nodes."""
        return str(self.ask("CLUSTER MYID"))


class ValkeyCluster:
    """All nodes. `url` is what services are given."""

    def __init__(self, nodes: Sequence[ValkeyNode]) -> None:
        self.nodes = tuple(nodes)
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    def form(self) -> None:
        """Make a cluster of started nodes: the first three get the slots, the others one primary each."""
        primaries, replicas = self.nodes[:PRIMARIES], self.nodes[PRIMARIES:]
        share = REDIS_CLUSTER_HASH_SLOTS // PRIMARIES + 1
        for number, node in enumerate(primaries):
            first = number * share
            node.ask("CLUSTER ADDSLOTSRANGE", first, min(first + share, REDIS_CLUSTER_HASH_SLOTS) - 1)
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER SET-CONFIG-EPOCH", number + 1)
            if number:
                self.nodes[0].ask("CLUSTER MEET", "127.0.0.1", node.port, node.bus_port)
        infra.wait_until(self._everybody_known, within_s=READY_WITHIN_S)
        for primary, replica in zip(primaries, replicas, strict=True):
            replica.ask("CLUSTER REPLICATE", primary.id)
        self.wait_healthy()

    def wait_healthy(self) -> None:
        """Wait until all slots are served and every replica is in step."""
        infra.wait_until(self._why_not_healthy, within_s=READY_WITHIN_S)

    @property
    def primaries(self) -> list[ValkeyNode]:
        """The nodes that serve slots now: after failovers others than at first."""
        return [node for node in self.nodes if node.server.alive and node.ask("ROLE")[0] == "master"]

    def primary_of(self, key: str) -> ValkeyNode:
        """The node that serves a key now."""
        for node in self.nodes:
            for first, last, owner in _slot_ranges(node) if node.server.alive else ():
                if first <= _slot(key) <= last:
                    return next(each for each in self.nodes if each.port == owner)
        raise AssertionError(f"nobody serves {key}")

    def wait_promoted(self, key: str, after: ValkeyNode) -> ValkeyNode:
        """Wait until another node than `after` serves a key, by the word of all others."""
        infra.wait_until(lambda: self._not_promoted(key, after), within_s=READY_WITHIN_S)
        return self.primary_of(key)

    def _everybody_known(self) -> str | None:
        counts = [node.ask("CLUSTER INFO")["cluster_known_nodes"] for node in self.nodes]
        return None if counts == [str(len(self.nodes))] * len(self.nodes) else f"known nodes: {counts}"

    def _why_not_healthy(self) -> str | None:
        try:
            for node in self.nodes:
                if (state := node.ask("CLUSTER INFO")["cluster_state"]) != "ok":
                    return f"{node.port}: {state}"
                role = node.ask("ROLE")
                if role[0] == "slave" and role[3] != "connected":
                    return f"{node.port}: {role[3]}"
        except (RedisError, OSError) as error:
            return str(error)
        return None

    def _not_promoted(self, key: str, after: ValkeyNode) -> str | None:
        try:
            alive = [node for node in self.nodes if node.server.alive and node is not after]
            states = {node.ask("CLUSTER INFO")["cluster_state"] for node in alive}
            owner = {port for node in alive for first, last, port in _slot_ranges(node) if first <= _slot(key) <= last}
        except (RedisError, OSError) as error:
            return str(error)
        return None if states == {"ok"} and after.port not in owner else f"{states}, served by {owner}"


def _slot(key: str) -> int:
    return key_slot(key.encode())


def _slot_ranges(node: ValkeyNode) -> Iterator[tuple[int, int, int]]:
    with Redis(port=node.port, socket_timeout=10) as client:
        for first, last, owner, *_ in cast("Any", client).execute_command("CLUSTER SLOTS"):
            yield first, last, owner[1]


@contextmanager
def valkey_cluster_running(folder: Path) -> Iterator[ValkeyCluster]:
    """A cluster of six processes, formed (about three seconds). Skips where stores are containers."""
    if infra.containers_wanted():
        pytest.skip("the container's options are fixed")
    with ExitStack() as running:
        nodes = [ValkeyNode(folder / f"node-{number}") for number in range(2 * PRIMARIES)]
        for node in nodes:
            running.callback(node.kill)
            node.start()
        cluster = ValkeyCluster(nodes)
        cluster.form()
        yield cluster

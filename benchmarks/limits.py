"""Are limits exact: `python -m benchmarks limits [--rounds N]`.

Two gateways over one Valkey and one NATS; in each round 50 requests are sent at once, half to each, by a tenant of its
own whose limit lets fewer through. What is admitted must be exactly what the limit says, in every round: requests a
minute, tokens a minute, requests at once, the budget of the month, and the length of the queue; each as a limit of the
tenant, of its key, and of the model for it. Case B09.
"""

import argparse
import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import aiohttp

from benchmarks.gateway_mesh import FAST, HOLD, NARROW, GatewayMesh, gateway_mesh
from benchmarks.report import Figure, Goal, Report
from deploy.local.ports import free_ports
from deploy.local.probes import listening_probe
from deploy.local.server import LocalServer

NAME = "limits"
DESCRIPTION = "50 simultaneous requests over two gateways against each limit: admitted is exact"

CALLERS = 50
PROMPT = [1, 2, 3]  # three tokens, and with 17 of output a request takes 20
OUTPUT_TOKENS = 17


@dataclass(frozen=True, slots=True)
class Case:
    """One limit: each round admits exactly `admitted`."""

    name: str
    limits: dict[str, Any]
    model: str
    admitted: int
    taken_first: int = 0  # requests sent before, one after the other, so that every slot is taken
    refused_as: frozenset[int] = field(default_factory=lambda: frozenset({429}))
    of: str = "tenant"  # tenant, key or model

    @property
    def label(self) -> str:
        """Its name in the report."""
        return self.name if self.of == "tenant" else f"{self.name}_of_{self.of}"

    def tenant(self, name: str) -> dict[str, Any]:
        """The declaration of a tenant that meets it."""
        if self.of == "key":
            return {"name": name}
        if self.of == "model":
            return {"name": name, "limits_per_model": [{"model": self.model, **self.limits}]}
        own = {key: value for key, value in self.limits.items() if key != "budget"}
        budget = {"budget": self.limits["budget"]} if "budget" in self.limits else {}
        return {"name": name, "limits": own, **budget}


LIMITS = (
    Case("requests_per_minute", {"requests_per_minute": 10}, FAST, 10),
    Case("tokens_per_minute", {"tokens_per_minute": 100}, FAST, 5),  # 100 / (3 + 17)
    Case("concurrent_requests", {"concurrent_requests": 7}, HOLD, 7),
    # The model costs a millionth a token of output: 100 millionths / 17 each = 5, and 15 are left.
    Case("budget", {"budget": {"amount": "0.0001"}}, FAST, 5),
    # One slot, taken before: what is admitted waits.
    Case("queue_depth", {"queued_requests": 5}, NARROW, 5, taken_first=1),
)
CASES = tuple(replace(case, of=of) for of in ("tenant", "key", "model") for case in LIMITS)


def run(arguments: Sequence[str]) -> Report:
    """Start the mesh with a second gateway, run every case, stop all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks limits", description=DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each limit (default 20)")
    options = parser.parse_args(arguments)
    return asyncio.run(_measure(options.rounds))


def _tenant(case: Case, round_number: int) -> str:
    return f"{case.label.replace('_', '-')}-{round_number}"


async def _measure(rounds: int) -> Report:
    rounds_of = [(case, _tenant(case, number)) for case in CASES for number in range(rounds)]
    tenants = [case.tenant(name) for case, name in rounds_of]
    key_limits = {name: case.limits for case, name in rounds_of if case.of == "key"}
    figures: dict[str, Figure] = {"rounds": rounds, "requests_per_round": CALLERS, "gateways": 2}
    goals: list[Goal] = []
    started = gateway_mesh(tenants=tenants, models=(FAST, HOLD, NARROW), key_limits=key_limits)
    async with started as mesh, _second_gateway(mesh) as second:
        ports = (mesh.http_port, second)
        for case in CASES:
            admitted = [await _round(ports, mesh.mesh.keys[_tenant(case, number)], case) for number in range(rounds)]
            exact = sum(count == case.admitted for count in admitted)
            figures[f"{case.label}_admitted_min"], figures[f"{case.label}_admitted_max"] = min(admitted), max(admitted)
            goals.append(
                Goal(f"rounds that admit exactly {case.admitted}: {case.label}", f"= {rounds}", exact, exact == rounds)
            )
    return Report(NAME, figures, {}, goals)


async def _round(ports: Sequence[int], key: str, case: Case) -> int:
    """How many of 50 simultaneous requests were admitted. Raises AssertionError for any answer that is neither."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers={"Authorization": f"Bearer {key}"}
    ) as session:
        kept = [await _ask(session, ports[0], case.model) for _ in range(case.taken_first)]
        answers = await asyncio.gather(
            *(_ask(session, ports[number % len(ports)], case.model) for number in range(CALLERS))
        )
        statuses = [answer.status for answer in answers]
        for answer in [*kept, *answers]:
            answer.close()
    unexpected = [status for status in statuses if status != 200 and status not in case.refused_as]
    assert not unexpected, f"{case.label}: {unexpected}"
    return statuses.count(200)


async def _ask(session: aiohttp.ClientSession, port: int, model: str) -> aiohttp.ClientResponse:
    body = {"model": model, "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "stream": True}
    return await session.post(f"http://127.0.0.1:{port}/v1/completions", json=body)


@asynccontextmanager
async def _second_gateway(mesh: GatewayMesh) -> AsyncIterator[int]:
    """A gateway like the first one, on ports and a folder of its own; yields its HTTP port."""
    [part] = [part for part in mesh.mesh.cluster.plan.parts if part.name == "gateway"]
    first = part.program
    http, grpc, admin, ops = free_ports(4)
    own = {"HTTP_PORT": http, "GRPC_PORT": grpc, "ADMIN_PORT": admin, "OPS_PORT": ops, "INSTANCE_ID": "gateway-2"}
    environment = {**first.command.environment, **{f"ROUNDHOUSE_{name}": str(value) for name, value in own.items()}}
    command = replace(first.command, environment=environment, log=first.command.log.with_name("gateway-2.log"))
    program = replace(first, name="gateway-2", command=command, port=http, probe=partial(listening_probe, http))
    server = LocalServer(program)
    server.spawn()
    try:
        await asyncio.to_thread(server.wait_ready)
        yield http
    finally:
        await asyncio.to_thread(server.stop)

"""A gateway in a process of its own, to be killed: its node is a fake one, everything else is real.

Run as `python -m tests.integration.gateway.doomed_gateway NATS REDIS CHECKPOINT NAME INTERVAL_MS`; prints `ready`.
"""

import asyncio
import sys

from roundhouse import lifecycle
from roundhouse.lifecycle import Lifecycle
from services.gateway.app import Addresses, World, application
from services.gateway.settings import GatewaySettings
from tests.fakes.catalogue import FixedCatalogue
from tests.fakes.inference_node import FakeNode
from tests.unit.gateway.gateway_world import catalogue, llm_model


async def main(nats_url: str, redis_url: str, checkpoint: str, name: str, interval_ms: int) -> None:
    """Serve until killed."""
    node = FakeNode(interval_ms=interval_ms)
    world = World(catalogue=FixedCatalogue(catalogue(llm_model(tokenizer_path=checkpoint))), node=node)
    settings = GatewaySettings(
        nats_url=nats_url,
        redis_url=redis_url,
        instance_id=name,
        cluster="c",
        http_port=0,
        grpc_port=0,
        admin_port=0,
        outbox_dir=f"{checkpoint}/../outbox",
    )
    async with asyncio.TaskGroup() as tasks:
        life: Lifecycle = lifecycle.Lifecycle(tasks)
        async with application(settings, world, Addresses())(life):
            sys.stdout.write("ready\n")
            sys.stdout.flush()
            await asyncio.Event().wait()


if __name__ == "__main__":
    nats, redis, folder, own_name, interval = sys.argv[1:]
    asyncio.run(main(nats, redis, folder, own_name, int(interval)))

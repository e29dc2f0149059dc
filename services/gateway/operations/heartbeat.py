"""What a gateway does once a second for everything that waits or runs on it.

The two turns are separate, so that a bus that is away does not keep the store from being told, and the other way round.
"""

from collections.abc import Iterator

from roundhouse.clock import Clock
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.settlements import Settlements
from services.gateway.ports import Admission, SchedulerGateway

ENTRIES_MAX = 2_000  # leases and finishes of one message: some 500 kB; NATS takes 1 MB by default
HEARTBEAT_MS = 1_000  # contract: ARCHITECTURE.md, "The life of a request", step 8


async def beat(attempts: Attempts, scheduler: SchedulerGateway, clock: Clock) -> None:
    """Renew the leases of all granted attempts and repeat recent finishes. Raises Unavailable."""
    message = attempts.heartbeat(clock.now_ms())
    if message is not None:
        for part in _parts(message):
            await scheduler.heartbeat(part)


def _parts(message: wire.Heartbeat) -> Iterator[wire.Heartbeat]:
    """The message, in pieces that the bus takes."""
    for start in range(0, max(len(message.leases), len(message.finished)), ENTRIES_MAX):
        piece = slice(start, start + ENTRIES_MAX)
        yield wire.Heartbeat(
            gateway_id=message.gateway_id,
            sent_unix_ms=message.sent_unix_ms,
            leases=message.leases[piece],
            finished=message.finished[piece],
        )


async def renew(attempts: Attempts, admission: Admission, settlements: Settlements) -> None:
    """Renew the concurrency leases, then settle what could not be settled before. Raises Unavailable."""
    held = attempts.held()
    if held:
        await admission.renew(held)
    await settlements.retry()

"""What a gateway does once a second for everything that waits or runs on it.

The two turns are separate, so that a bus that is away does not keep the store from being told, and the other way round.
"""

from roundhouse.clock import Clock
from services.gateway.operations.attempts import Attempts
from services.gateway.operations.settlements import Settlements
from services.gateway.ports import Admission, SchedulerGateway

HEARTBEAT_MS = 1_000  # contract: ARCHITECTURE.md, "The life of a request", step 8


async def beat(attempts: Attempts, scheduler: SchedulerGateway, clock: Clock) -> None:
    """Renew the leases of all granted attempts and repeat recent finishes. Raises Unavailable."""
    message = attempts.heartbeat(clock.now_ms())
    if message is not None:
        await scheduler.heartbeat(message)


async def renew(attempts: Attempts, admission: Admission, settlements: Settlements) -> None:
    """Renew the concurrency leases, then settle what could not be settled before. Raises Unavailable."""
    held = attempts.held()
    if held:
        await admission.renew(held)
    await settlements.retry()

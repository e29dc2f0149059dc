"""`BudgetAlerts` on the billing stream and the audit stream.

Each alert has a subject of its own, and is published on the condition that the stream has no message there yet. So the
stream itself makes it once, over restarts, replicas and a store that forgot; no other state is needed.
"""

from typing import Final

from nats.errors import Error as NatsError
from nats.js.errors import APIError
from nats.js.errors import Error as JetStreamError

from roundhouse import subjects
from roundhouse.audit_trail import BusAuditTrail
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1.usage_pb2 import BudgetAlert

TIMEOUT_S: Final = 2.0
_ALREADY_THERE: Final = 10071  # JetStream's code for "wrong last sequence"
_NONE_THERE_YET: Final = {"Nats-Expected-Last-Subject-Sequence": "0"}


class StreamAlerts:
    """See `ports.BudgetAlerts`."""

    def __init__(self, bus: NatsBus, audit: BusAuditTrail) -> None:
        self._bus = bus
        self._audit = audit

    async def tell(self, alert: BudgetAlert) -> bool:
        """See `BudgetAlerts.tell`."""
        subject = subjects.budget_alert(alert.tenant_id, alert.period, alert.percent)
        try:
            await self._bus.jetstream.publish(
                subject, alert.SerializeToString(), timeout=TIMEOUT_S, headers=dict(_NONE_THERE_YET)
            )
        except APIError as error:
            if error.err_code == _ALREADY_THERE:
                return False
            raise Unavailable("the billing stream takes no alert now") from error
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable("the billing stream takes no alert now") from error
        details = {"period": alert.period, "spent": alert.spent, "budget": alert.budget, "currency": alert.currency}
        reason = f"{alert.percent}% of the budget of {alert.period} is spent"
        await self._audit.record(
            "budget.alert", actor="metering", subject=alert.tenant_id, reason=reason, details=details
        )
        return True

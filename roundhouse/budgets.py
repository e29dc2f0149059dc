"""Money and periods of budgets, as gateways (which reserve) and metering (which counts) both write them. No rule.

Redis compares whole numbers: micro-units, millionths of the currency. A cost is rounded up and a budget down, so that
rounding never lets more through; it is never added up rounded. Whole below 2^53 in Lua too: budgets up to nine billion.
Periods are UTC: `2026-11` is a month, `2026-11-30` a day. Decision: docs/decisions/0111-budgets.md.
"""

from datetime import UTC, datetime, timedelta
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Final

MICRO: Final = Decimal(1_000_000)
MICRO_MAX: Final = 2**53 - 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_CONTEXT: Final = Context(prec=80)  # as metering's own arithmetic: nothing is rounded before the last step

KNOWN: Final = "rh:budgets:sequence"
"""Redis key: the ledger's sequence up to which every tenant's spend is in the store; gone = the store forgot."""


KEY_SCOPES: Final = "rh:budgets:keys"
"""Redis hash: id of a key with a budget → its tenant and the scope of that budget, with a space between."""


def key_scope(key_id: str) -> str:
    """The scope of a key. A successor by rotation goes on with the budget of the first: it is named by that one."""
    return f"k:{key_id}"


def model_scope(name: str) -> str:
    """The scope of a model or adapter, by the name that is called."""
    return f"m:{name}"


def budget_key(tenant_id: str, scope: str = "") -> str:
    """Redis hash of a tenant: `spent:<period>:<currency>` and `reserved` in micro-units, `sequence` of the ledger.

    `scope`: of one key or one model of that tenant. `:holds` behind it is a sorted set of request ids by when their
    reservation ends, ms; `:amounts` a hash of the reservations in micro-units. All with the tenant's hash tag."""
    return f"rh:{{t:{tenant_id}}}:budget{':' + scope if scope else ''}"


def spent_field(period: str, currency: str) -> str:
    """Field of `budget_key` with what was spent in a period."""
    return f"spent:{period}:{currency}"


def period_text(kind: str, time_ms: int) -> str:
    """The period of a kind (`month` or `day`) that holds an instant."""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.strftime("%Y-%m-%d" if kind == "day" else "%Y-%m")


def micro_up(amount: Decimal) -> int:
    """An amount in micro-units, rounded up, as a cost is."""
    return min(MICRO_MAX, int(_CONTEXT.multiply(amount, MICRO).to_integral_value(ROUND_CEILING)))


def micro_down(amount: Decimal) -> int:
    """An amount in micro-units, rounded down, as a budget is."""
    return min(MICRO_MAX, int(_CONTEXT.multiply(amount, MICRO).to_integral_value(ROUND_FLOOR)))

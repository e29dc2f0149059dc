"""Where a gateway writes how each admitted request ended, and metering reads it to compare. Names only.

A Redis stream of each tenant, bounded: one entry a request, made in the step that settles it in the quota. Fields:
`r` request id, `k` kind, `t` tokens that were charged to the quota (input and output of all attempts).
"""

from typing import Final

SETTLED: Final = "s"
WITHDRAWN: Final = "w"  # refused after it was admitted: nothing was charged
LAPSED: Final = "l"  # its gateway died or was cut off: nobody settled it

ENTRIES_MAX: Final = 200_000
"""Of one tenant; about 40 bytes each. A tenant with more requests between two comparisons loses the oldest entries."""

KEEP_MS: Final = 3 * 3_600_000
"""After a tenant's last request: comparisons run hourly."""


def settlements_key(tenant_id: str) -> str:
    """The stream of a tenant."""
    return f"rh:{{t:{tenant_id}}}:settled"


def leases_key(tenant_id: str) -> str:
    """The tenant's running requests: a sorted set of request ids by when their lease runs out, ms."""
    return f"rh:{{t:{tenant_id}}}:leases"

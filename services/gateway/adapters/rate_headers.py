"""`x-ratelimit-*` headers of an admitted request, and the times of a finished one.

Source: OpenAI, "Rate limits", headers; a reset is written `6m0s`, `1.5s`, `12ms`.
"""

from services.gateway.operations.run import Run
from services.gateway.ports import Admitted


def rate_limit_headers(admitted: Admitted) -> list[tuple[bytes, bytes]]:
    """What is left of the minute in the scope with least left; nothing where there is no such limit."""
    headers: list[tuple[str, str]] = []
    for what, limit, remaining, reset_ms in (
        ("requests", admitted.requests_limit, admitted.remaining_requests, admitted.reset_requests_ms),
        ("tokens", admitted.tokens_limit, admitted.remaining_tokens, admitted.reset_tokens_ms),
    ):
        if limit is None or remaining is None:
            continue
        headers.append((f"x-ratelimit-limit-{what}", str(limit)))
        headers.append((f"x-ratelimit-remaining-{what}", str(max(0, remaining))))
        headers.append((f"x-ratelimit-reset-{what}", duration_text(reset_ms)))
    return [(name.encode(), value.encode()) for name, value in headers]


def duration_text(milliseconds: int) -> str:
    """A duration in OpenAI's notation."""
    if milliseconds < 1000:
        return f"{max(0, milliseconds)}ms"
    minutes, rest_ms = divmod(milliseconds, 60_000)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def timings(run: Run) -> dict[str, int]:
    """Where the wait went, milliseconds."""
    grant = run.grant
    return {
        "queue_ms": grant.queue_ms if grant else 0,
        "stage_ms": grant.stage_ms if grant else 0,
        "load_ms": grant.load_ms if grant else 0,
    }


def served_by(run: Run) -> list[tuple[bytes, bytes]]:
    """`x-roundhouse-served-by`: the model that answers, which a fallback makes another one than was asked for."""
    return [(b"x-roundhouse-served-by", run.work.model.name.encode())]


def timing_headers(run: Run) -> list[tuple[bytes, bytes]]:
    """`x-roundhouse-queue-ms`, `-stage-ms` and `-load-ms`."""
    return [
        (f"x-roundhouse-{name.replace('_', '-')}".encode(), str(value).encode()) for name, value in timings(run).items()
    ]

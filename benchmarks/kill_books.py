"""What the clients of a kill run received against the ledger and the billing stream, request by request.

"Equal" means, for a request whose stream ended as it should: tokens in the client's text = tokens of its ledger rows =
tokens billed. For one whose gateway was killed: every token that the client received is billed, and what is billed
beyond it is at most the one piece that the gateway was handing on when it died (the engine had generated it). Lost is
what a client received and nobody billed; double is what is billed beyond that.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from benchmarks.kill_load import Client
from roundhouse.wire.v1.usage_pb2 import RatedRecord

PIECE_TOKENS_MAX = (
    16  # a gateway on a busy core joins the tokens that came together; at 20 ms each 16 are a third second
)


@dataclass(frozen=True, slots=True)
class Row:
    """One ledger row."""

    request_id: str
    attempt: int
    output_tokens: int


@dataclass(slots=True)
class Tally:
    """One line of the matrix."""

    part: str
    kills: int = 0
    requests: int = 0
    finished: int = 0  # streams that ended as they should
    cut: int = 0  # streams that a kill ended after a first header
    refused: int = 0  # no stream: an error, or no connection
    streamed: int = 0  # tokens that clients received
    ledger: int = 0
    billed: int = 0
    lost: int = 0
    double: int = 0
    in_flight: int = 0  # tokens of pieces that were being handed on at a kill
    in_flight_max: int = 0  # of one request
    exact: int = 0  # cut streams whose bill is to the token what the client received
    unknown_rows: int = 0  # rows of requests whose client never saw a header


def tally(part: str, kills: int, clients: Sequence[Client], rows: Sequence[Row], billed: Mapping[str, int]) -> Tally:
    """Compare a block. `rows` and `billed` (by request) are those of this block's time."""
    line = Tally(part, kills, len(clients))
    by_request: dict[str, int] = defaultdict(int)
    seen: set[tuple[str, int]] = set()
    for row in rows:
        line.double += row.output_tokens if (row.request_id, row.attempt) in seen else 0
        seen.add((row.request_id, row.attempt))
        by_request[row.request_id] += row.output_tokens
    line.ledger, line.billed = sum(by_request.values()), sum(billed.values())
    for client in clients:
        _add_client(line, client, by_request.pop(client.request_id, 0) if client.request_id else 0)
    for tokens in by_request.values():  # their clients saw no header, so no token either
        line.unknown_rows += 1
        _add_in_flight(line, tokens)
    return line


def _add_client(line: Tally, client: Client, ledger: int) -> None:
    received = client.tokens
    line.streamed += received
    line.lost += max(0, received - ledger)
    if client.done:
        line.finished += 1
        line.double += max(0, ledger - received)
        line.lost += abs((client.usage or 0) - received)
    elif client.status == 200:
        line.cut += 1
        line.exact += ledger == received
        _add_in_flight(line, max(0, ledger - received))
    else:
        line.refused += 1
        line.double += max(0, ledger - received)


def _add_in_flight(line: Tally, tokens: int) -> None:
    if tokens > PIECE_TOKENS_MAX:
        line.double += tokens
    else:
        line.in_flight += tokens
        line.in_flight_max = max(line.in_flight_max, tokens)


def folded(records: Iterable[RatedRecord]) -> dict[str, tuple[int, Decimal]]:
    """A billing consumer's view by event id: repeats dropped by key, corrections in place of what they correct."""
    kept: dict[str, tuple[int, int, Decimal]] = {}
    for record in records:
        before = kept.get(record.event.id)
        if before is None or record.sequence > before[0]:
            kept[record.event.id] = (record.sequence, record.event.data.output_tokens, Decimal(record.amount))
    return {event_id: (tokens, amount) for event_id, (_, tokens, amount) in kept.items()}


def billed_by_request(records: Iterable[RatedRecord]) -> dict[str, int]:
    """Output tokens billed, by request."""
    found: dict[str, int] = defaultdict(int)
    for event_id, (tokens, _) in folded(records).items():
        found[event_id.rpartition("/")[0]] += tokens
    return dict(found)

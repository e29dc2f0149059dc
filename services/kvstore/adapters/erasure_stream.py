"""`ErasureOrders` from the JetStream stream ERASURES, and `ErasureMark` as a small file beside the blocks."""

import os
from collections.abc import Mapping
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.ports import Ordered

log = structlog.get_logger(__name__)


class StreamedOrders:
    """Over a bus that is connected."""

    def __init__(self, bus: NatsBus) -> None:
        """Owns nothing."""
        self._jetstream = bus.jetstream

    async def after(self, sequence: int) -> tuple[int, Mapping[bytes, Ordered]]:
        """See `ErasureOrders.after`. One request for each order: there are few."""
        found: dict[bytes, Ordered] = {}
        try:
            state = (await self._jetstream.stream_info(subjects.ERASURES_STREAM)).state
            for number in range(max(sequence + 1, state.first_seq), state.last_seq + 1):
                order = await self._order(number)
                found[order.salt_hash] = Ordered(order.tenant_id, number)
        except NotFoundError:
            return 0, {}  # nobody has made the stream: nothing was ordered
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable("the stream of erasures does not answer") from error
        return state.last_seq, found

    async def _order(self, sequence: int) -> kv_pb2.ErasureOrder:
        try:
            message = await self._jetstream.get_msg(subjects.ERASURES_STREAM, sequence)
            return kv_pb2.ErasureOrder.FromString(message.data or b"")
        except (NotFoundError, DecodeError):  # removed by hand, or not ours
            return kv_pb2.ErasureOrder()


class MarkFile:
    """A number in a file; `path` None keeps it for as long as the process, as the blocks then are."""

    def __init__(self, path: Path | None) -> None:
        """Touches nothing yet."""
        self._path = path

    def load(self) -> int:
        """See `ErasureMark.load`. What cannot be read is 0: everything is carried out again, which costs a cache."""
        try:
            return int(self._path.read_text()) if self._path is not None else 0
        except (OSError, ValueError):
            return 0

    def save(self, sequence: int) -> None:
        """See `ErasureMark.save`."""
        if self._path is None:
            return
        beside = self._path.with_suffix(".new")
        try:
            beside.write_text(str(sequence))
            os.replace(beside, self._path)
        except OSError as error:
            log.warning("erasure_mark_not_kept", text=error.strerror)

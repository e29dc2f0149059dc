"""`ReconcilingSources`: the settlements of the gateways in Redis, and both streams, read from an instant on."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar, cast

from nats.errors import Error as NatsError
from nats.errors import TimeoutError as NatsTimeout
from nats.js.api import ConsumerConfig, DeliverPolicy
from nats.js.errors import Error as JetStreamError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.settlements import LAPSED, SETTLED, WITHDRAWN, leases_key, settlements_key
from roundhouse.wire.v1 import usage_pb2
from services.metering.domain.reconciling import Billed, Emitted, Ending, RequestKey, Settlement
from services.metering.ports import PriceSource

MARK: Final = "rh:reconcile:until"
TURN: Final = "rh:reconcile:turn"
TURN_MS: Final = 1_800_000  # a comparison of an hour takes minutes at most; a process that died loses its turn
PAGE: Final = 5_000
READ_WAIT_S: Final = 5.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ENDINGS: Final = {SETTLED: Ending.SETTLED, WITHDRAWN: Ending.WITHDRAWN, LAPSED: Ending.LAPSED}
_STORE_ERRORS: Final = (RedisError, OSError, TimeoutError)
_BUS_ERRORS: Final = (NatsError, JetStreamError, TimeoutError)
Entry = TypeVar("Entry", Emitted, Billed)


class StreamSources:
    """See `ports.ReconcilingSources`."""

    def __init__(self, redis: Redis, bus: NatsBus, catalogue: PriceSource) -> None:
        self._redis = redis
        self._bus = bus
        self._catalogue = catalogue

    async def begin(self, until_ms: int, *, every_ms: int) -> int | None:
        """See `ReconcilingSources.begin`."""
        try:
            mark = await self._redis.get(MARK)
            if mark is None:  # the first time: nothing before now is known
                await self._redis.set(MARK, until_ms, nx=True)
                return None
            if until_ms - int(mark) < every_ms:
                return None
            return int(mark) if await self._redis.set(TURN, "1", nx=True, px=TURN_MS) else None
        except _STORE_ERRORS as error:
            raise Unavailable("the store of settlements does not answer") from error

    async def done(self, until_ms: int) -> None:
        """See `ReconcilingSources.done`."""
        try:
            await self._redis.set(MARK, until_ms)
            await self._redis.delete(TURN)
        except _STORE_ERRORS as error:
            raise Unavailable("the store of settlements does not answer") from error

    async def settlements(self, tenants: Collection[str], from_ms: int, to_ms: int) -> Sequence[Settlement]:
        """See `ReconcilingSources.settlements`."""
        found: list[Settlement] = []
        try:
            for tenant_id in sorted({*tenants, *self._catalogue.current.tenants}):
                found += await self._leases(tenant_id)
                found += await self._entries(tenant_id, from_ms, to_ms)
        except _STORE_ERRORS as error:
            raise Unavailable("the store of settlements does not answer") from error
        return found

    async def emitted(self, from_ms: int, to_ms: int) -> Sequence[Emitted]:
        """See `ReconcilingSources.emitted`."""
        return await self._read(subjects.USAGE_STREAM, subjects.USAGE_SUBJECTS, _emitted, from_ms, to_ms)

    async def billed(self, from_ms: int, to_ms: int) -> Sequence[Billed]:
        """See `ReconcilingSources.billed`."""
        return await self._read(subjects.BILLING_STREAM, subjects.BILLING_RECORDS, _billed, from_ms, to_ms)

    async def _leases(self, tenant_id: str) -> list[Settlement]:
        """Requests that nobody settled: they run, or their gateway died and no later request noted it yet."""
        seconds, micros = await cast("Any", self._redis.time())
        now_ms = seconds * 1000 + micros // 1000
        held: list[tuple[bytes, float]] = await self._redis.zrange(leases_key(tenant_id), 0, -1, withscores=True)
        return [
            Settlement(RequestKey(tenant_id, name.decode()), Ending.RUNNING if ends > now_ms else Ending.LAPSED, 0, 0)
            for name, ends in held
        ]

    async def _entries(self, tenant_id: str, from_ms: int, to_ms: int) -> list[Settlement]:
        found: list[Settlement] = []
        start = str(max(0, from_ms))
        while True:
            page = await self._redis.xrange(settlements_key(tenant_id), min=start, max=str(to_ms), count=PAGE)
            for name, fields in page:
                key = RequestKey(tenant_id, fields[b"r"].decode())
                time_ms = int(name.partition(b"-")[0])
                found.append(Settlement(key, _ENDINGS[fields[b"k"].decode()], int(fields[b"t"]), time_ms))
            if len(page) < PAGE:
                return found
            start = f"({page[-1][0].decode()}"

    async def _read(
        self, stream: str, subject: str, made_of: Callable[[bytes], Entry], from_ms: int, to_ms: int
    ) -> list[Entry]:
        """Messages stored since `from_ms`, up to the last one there is; those beyond the window are dropped."""
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=_EPOCH + timedelta(milliseconds=from_ms)
        )
        found: list[Entry] = []
        try:
            subscription = await self._bus.jetstream.subscribe(
                subject, stream=stream, ordered_consumer=True, config=config
            )
            try:
                left = (await subscription.consumer_info()).num_pending or 0
                left += subscription.pending_msgs
                while left:
                    message = await subscription.next_msg(READ_WAIT_S)
                    entry = made_of(message.data)
                    if from_ms <= entry.time_ms < to_ms:
                        found.append(entry)
                    left = message.metadata.num_pending
            finally:
                await subscription.unsubscribe()
        except NatsTimeout as error:
            raise Unavailable(f"the stream {stream} stopped answering") from error
        except _BUS_ERRORS as error:
            raise Unavailable(f"the stream {stream} cannot be read") from error
        return found


def _emitted(data: bytes) -> Emitted:
    event = usage_pb2.UsageEvent.FromString(data)
    used = event.data
    key = RequestKey(event.subject, used.request_id)
    return Emitted(key, event.id, used.emitter, used.input_tokens, used.output_tokens, event.time_unix_ms)


def _billed(data: bytes) -> Billed:
    record = usage_pb2.RatedRecord.FromString(data)
    event, used = record.event, record.event.data
    key = RequestKey(event.subject, used.request_id)
    return Billed(
        key,
        event.id,
        record.sequence,
        used.input_tokens,
        used.output_tokens,
        record.amount,
        event.time_unix_ms,
    )

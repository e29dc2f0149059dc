"""The history of a pool as one Redis stream, cut to a length: every replica appends, every replica reads all of it."""

from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import PoolName
from services.scheduler.adapters.redis_store import pool_prefix
from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.history import Entry, Happened

ENTRIES_MOST = 100_000  # more than a day of entries of one replica each second; some 20 MB in the store
READ_MOST = 1_000  # entries of one read: some 200 kB
_FIELD = b"h"

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(tuple[int, dict[str, tuple[int, int, int, int, int]]])


class RedisHistory:
    """`History` over one client, which the caller closes."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def append(self, pool: PoolName, entry: Entry) -> None:
        """See `History.append`."""
        counts = {
            version: (each.arrivals, each.ended, each.run_ms, each.wait_ms, each.granted)
            for version, each in entry.versions.items()
        }
        data = _encoder.encode((entry.at_ms, counts))
        try:
            await cast("Any", self._redis).xadd(_key(pool), {_FIELD: data}, maxlen=ENTRIES_MOST, approximate=True)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the history could not be written") from error

    async def after(self, pool: PoolName, cursor: str) -> tuple[tuple[Entry, ...], str]:
        """See `History.after`."""
        start = f"({cursor}" if cursor else "-"
        try:
            found = await cast("Any", self._redis).xrange(_key(pool), min=start, max="+", count=READ_MOST)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the history could not be read") from error
        entries = tuple(_entry(fields[_FIELD]) for _, fields in found)
        return entries, found[-1][0].decode() if found else cursor


def _key(pool: PoolName) -> str:
    return f"{pool_prefix(pool)}history"


def _entry(data: bytes) -> Entry:
    at_ms, counts = _decoder.decode(data)
    return Entry(at_ms, {VersionKey(name): Happened(*each) for name, each in counts.items()})

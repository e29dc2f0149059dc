"""Generations of the catalogue in Redis, and the reader that follows them in every service.

A whole generation is replaced in one compare-and-set on its number, so that readers see the old one or the new one and
two operators cannot overwrite each other. A reader keeps serving what it has while Redis is away, and puts it back if
Redis comes back empty: the catalogue must not vanish because a cache was restarted (invariant 18). It does not parse or
check declarations: `declaration` does. Decision: docs/decisions/0080-catalogue-store.md.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol, cast

import msgspec
import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse import subjects
from roundhouse.catalogue.records import EMPTY, Catalogue
from roundhouse.errors import Conflict, Unavailable
from roundhouse.event_bus import EventBus, Message
from roundhouse.lifecycle import Lifecycle
from roundhouse.redis_edge import LuaScript

log = structlog.get_logger(__name__)

CATALOGUE_KEY = "rh:catalogue"  # one hash: generation, token, data; a single key needs no hash tag
POLL_MS = 1_000  # how late a reader may be when the bus lost the announcement
_TOKEN_HEX_DIGITS = 16  # enough to tell two contents of one generation number apart

_put = LuaScript("roundhouse.catalogue", "put_generation.lua")
_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Catalogue).decode

Listener = Callable[[Catalogue], None]
"""Gets each new generation. Runs on the event loop and must not block."""


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """One generation as it lies in the store; `token` tells two contents apart without reading them."""

    catalogue: Catalogue
    token: str


class GenerationStore(Protocol):
    """Where the current generation lies. `tests/fakes/catalogue.py` has the in-memory twin."""

    async def get(self) -> StoredGeneration | None:
        """The current generation; None if none was ever put. Raises Unavailable."""
        ...

    async def token(self) -> str | None:
        """The token of the current generation, without its content. Raises Unavailable."""
        ...

    async def put(self, catalogue: Catalogue, *, expected_generation: int) -> None:
        """Replace the generation numbered `expected_generation` (0 = none). Raises Conflict, Unavailable.

        A cancelled or failed call may or may not have taken effect; ask `get`."""
        ...


class CatalogueView(Protocol):
    """What operations need of the catalogue."""

    @property
    def current(self) -> Catalogue:
        """The generation to use now."""
        ...

    def subscribe(self, listener: Listener) -> None:
        """Call `listener` for each later generation, and at once if there is one already."""
        ...

    async def refresh(self) -> None:
        """Take what is stored now. Raises Unavailable and then keeps what it has. Idempotent."""
        ...


class CatalogueStore:
    """`GenerationStore` in Valkey or Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def get(self) -> StoredGeneration | None:
        """See `GenerationStore.get`."""
        token, data = await self._fields("token", "data")
        if token is None or data is None:
            return None
        try:
            return StoredGeneration(_decode(data), token.decode())
        except msgspec.MsgspecError as error:
            raise Unavailable("the stored catalogue was written by another version of this program") from error

    async def token(self) -> str | None:
        """See `GenerationStore.token`."""
        (token,) = await self._fields("token")
        return None if token is None else token.decode()

    async def put(self, catalogue: Catalogue, *, expected_generation: int) -> None:
        """See `GenerationStore.put`."""
        data = _encode(catalogue)
        token = content_token(catalogue.generation, data)
        done, stored = await _put(
            self._redis, [CATALOGUE_KEY], [expected_generation, catalogue.generation, token, data]
        )
        if not done:
            raise Conflict(f"the catalogue is at generation {stored}, not {expected_generation}: apply again")

    async def _fields(self, *names: str) -> list[bytes | None]:
        try:
            return cast("list[bytes | None]", await cast("Any", self._redis.hmget(CATALOGUE_KEY, list(names))))
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("the catalogue cannot be read now") from error


def content_token(generation: int, data: bytes) -> str:
    """Names one stored content: two writes of one generation number (after a failover) still differ."""
    return f"{generation}-{sha256(data).hexdigest()[:_TOKEN_HEX_DIGITS]}"


class CatalogueReader:
    """`CatalogueView` that follows the store. `current` is never older than about `POLL_MS` while Redis answers."""

    def __init__(self, redis: Redis, bus: EventBus, *, store: GenerationStore | None = None) -> None:
        self._store: GenerationStore = store or CatalogueStore(redis)
        self._bus = bus
        self._current = EMPTY
        self._token: str | None = None
        self._was_read = False
        self._listeners: list[Listener] = []
        self._one_at_a_time = asyncio.Lock()

    @property
    def current(self) -> Catalogue:
        """The newest generation seen; `EMPTY` (generation 0) before the first."""
        return self._current

    @property
    def not_ready_reason(self) -> str | None:
        """Why the process should not get work yet; None once the store was read, even if it holds nothing."""
        return None if self._was_read else "the catalogue was not read yet"

    def subscribe(self, listener: Listener) -> None:
        """See `CatalogueView.subscribe`."""
        self._listeners.append(listener)
        if self._token is not None:
            listener(self._current)

    async def start(self, lifecycle: Lifecycle) -> None:
        """Read once, then follow until the process stops. Returns also when Redis is away: the poll goes on."""
        await self._refresh_if_possible()
        await self._bus.subscribe(subjects.CATALOGUE_CHANGED, self._on_changed)
        lifecycle.every(POLL_MS, self.refresh, "catalogue_poll")

    async def refresh(self) -> None:
        """See `CatalogueView.refresh`."""
        async with self._one_at_a_time:
            token = await self._store.token()
            if token is None and self._token is not None:
                await self._put_back()
            elif token != self._token:
                self._take(await self._store.get())
            self._was_read = True

    def _take(self, stored: StoredGeneration | None) -> None:
        if stored is None:
            return
        self._current, self._token = stored.catalogue, stored.token
        log.info("catalogue_read", generation=stored.catalogue.generation)
        for listener in self._listeners:
            try:
                listener(stored.catalogue)
            except Exception:
                # One listener's fault must not keep the others on the old generation.
                log.exception("catalogue_listener_failed", generation=stored.catalogue.generation)

    async def _put_back(self) -> None:
        log.warning("catalogue_was_lost", generation=self._current.generation)
        try:
            await self._store.put(self._current, expected_generation=0)
        except Conflict:
            log.info("catalogue_restored_elsewhere")  # another reader was first; the next poll reads it

    async def _on_changed(self, _: Message) -> None:
        await self._refresh_if_possible()

    async def _refresh_if_possible(self) -> None:
        try:
            await self.refresh()
        except Unavailable as error:
            log.warning("catalogue_not_read", reason=error.message)

"""Blocks on the wire between two kvstores: large ones in several messages, small ones several in a message.

A message costs a fifth of a millisecond at either end, whatever is in it (Python's gRPC, measured), and an engine's
blocks are tens of kilobytes: one each would keep a decoding node from its steps.
"""

from collections.abc import AsyncIterable, Iterator, Sequence

from roundhouse.wire.v1 import kv_pb2
from services.kvstore.operations.send_blocks import Outgoing
from services.kvstore.ports import BlockArena, BlockHead, Landing, PeerFault

PIECE_BYTES = 1 << 20  # of a message: a quarter of gRPC's default limit, large enough to copy at full speed
PIECE_BYTES_MAX = 4 << 20  # taken from a peer of another release


def fetch_pieces(
    part: Sequence[Outgoing], arena: BlockArena, bytes_max: int, erasures_read: int
) -> Iterator[kv_pb2.FetchPiece]:
    """The messages of a part: one if it is several blocks, else pieces of at most `bytes_max`."""
    first = part[0].place
    head = kv_pb2.FetchPiece(erasures_read=erasures_read)
    message = _filled(head, part[0], arena, min(bytes_max, first.length))
    for block in part[1:]:
        _filled(message.also.add(erasures_read=erasures_read), block, arena, block.place.length)
    yield message
    for at in range(bytes_max, first.length, bytes_max):
        with arena.view(first.offset + at, min(bytes_max, first.length - at)) as view:
            yield kv_pb2.FetchPiece(data=bytes(view))


def _filled(piece: kv_pb2.FetchPiece, block: Outgoing, arena: BlockArena, length: int) -> kv_pb2.FetchPiece:
    """The head of a block and its first bytes."""
    place = block.place
    piece.key, piece.length, piece.checksum = place.key, place.length, place.checksum
    piece.model_digest = block.model_digest
    with arena.view(place.offset, length) as view:
        piece.data = bytes(view)
    return piece


async def land_pieces(messages: AsyncIterable[kv_pb2.FetchPiece], landing: Landing) -> None:
    """Copy what comes to its places until the landing wants no more. Raises PeerFault for bytes that do not fit."""
    joined = _Joined(landing)
    async for message in messages:
        for piece in (message, *message.also):
            if not joined.land(piece):
                return
    joined.check_whole()


class _Joined:
    """Pieces put together to blocks."""

    def __init__(self, landing: Landing) -> None:
        self._landing = landing
        self._place: memoryview | None = None
        self._at = 0

    def land(self, piece: kv_pb2.FetchPiece) -> bool:
        """Whether the block was wanted. Raises PeerFault."""
        data = piece.data  # each reading of it is a copy
        if piece.key:
            self.check_whole()
            head = BlockHead(piece.key, piece.length, piece.checksum, piece.model_digest, piece.erasures_read)
            self._place = self._landing.begin(head)
            self._at = 0
            if self._place is None:
                return False
        if self._place is None or self._at + len(data) > len(self._place) or len(data) > PIECE_BYTES_MAX:
            raise PeerFault("bytes that belong to no block")
        self._place[self._at : self._at + len(data)] = data
        self._at += len(data)
        if self._at == len(self._place):
            self._place = None
            self._landing.landed()
        return True

    def check_whole(self) -> None:
        """Raises PeerFault in the middle of a block."""
        if self._place is not None:
            raise PeerFault("a block ended too early")

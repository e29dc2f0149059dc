"""Other nodes' kvstores in this process. Passes `tests/contract/test_peer_transport.py` as the one over gRPC does."""

import asyncio
from dataclasses import dataclass, field

import xxhash

from services.kvstore.ports import BlockHead, Landing, PeerFault, PeerKeys, PeerRequest


@dataclass(slots=True)
class FakePeer:
    """What one peer has of any chain, by key; what it does wrong; what it was asked."""

    salt: bytes
    blocks: dict[bytes, bytes]
    checksums: dict[bytes, int] = field(default_factory=dict)  # lies
    fails_after: int | None = None  # blocks, and then a fault
    computing: dict[bytes, asyncio.Event] = field(default_factory=dict)  # blocks that come once this is set
    asked: list[PeerRequest] = field(default_factory=list)
    erasures_read: int = 0
    left: int = 0  # exchanges that were given up from the other side


class FakePeers:
    """`PeerTransport` to `FakePeer`s by address; an unknown address does not answer."""

    def __init__(self, peers: dict[str, FakePeer]) -> None:
        self.peers = peers
        self.snapshots: dict[str, PeerKeys] = {}

    async def fetch(self, address: str, request: PeerRequest, landing: Landing, *, timeout_ms: int) -> None:
        """In order, until one is missing. With a hold it waits for those that are being computed."""
        peer = self.peers.get(address)
        if peer is None:
            raise PeerFault("a fetch failed: UNAVAILABLE")
        peer.asked.append(request)
        for number, key in enumerate(request.keys[request.skip :]):
            if number == peer.fails_after:
                raise PeerFault("a fetch failed: UNAVAILABLE")
            if request.hold and key in peer.computing:
                try:
                    await peer.computing[key].wait()
                except asyncio.CancelledError:
                    peer.left += 1
                    raise
            data = peer.blocks.get(key)
            if data is None or request.salt != peer.salt:
                return
            checksum = peer.checksums.get(key, xxhash.xxh3_64_intdigest(data))
            place = landing.begin(BlockHead(key, len(data), checksum, b"sha256:model", peer.erasures_read))
            if place is None:
                return
            place[:] = data
            landing.landed()

    async def snapshot(self, address: str, key_bytes: int, *, timeout_ms: int) -> PeerKeys:
        """What was set."""
        found = self.snapshots.get(address)
        if found is None:
            raise PeerFault("a snapshot failed: UNAVAILABLE")
        keys = frozenset(key[:key_bytes] for key in found.keys)
        return PeerKeys(found.node_id, found.incarnation, found.sequence, keys)

    async def close(self) -> None:
        """Nothing is open."""

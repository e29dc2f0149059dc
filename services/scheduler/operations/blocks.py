"""Keeps this replica's index of prefix blocks: announcements as they come, and a full list where some were lost.

Best effort on purpose: without it requests only go to nodes that have to compute more.
"""

from functools import partial

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import NodeId
from roundhouse.wire.v1 import kv_pb2
from services.scheduler.domain.prefix_index import BlockChanges, Heard, PrefixIndex
from services.scheduler.operations.keyed_tasks import KeyedTasks
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.ports import BlockLists

log = structlog.get_logger(__name__)

PAUSE_MS = 1_000  # between two lists of one node: a list of a million keys is 8 MB
TRIES = 5  # then the next announcement asks again


class BlockFollower:
    """One index, one task a node that lost something. `stop` ends the tasks."""

    def __init__(self, index: PrefixIndex, lists: BlockLists, nodes: NodeRegistry, clock: Clock) -> None:
        self._index = index
        self._lists = lists
        self._nodes = nodes
        self._clock = clock
        self._fetching: KeyedTasks[NodeId] = KeyedTasks("block-list")

    def observe(self, events: kv_pb2.BlockEvents) -> None:
        """Take an announcement in; idempotent by its number."""
        node_id = NodeId(events.node_id)
        changes = BlockChanges(
            node_id, events.incarnation, events.sequence, tuple(events.stored), tuple(events.dropped)
        )
        if self._index.observe(changes) is Heard.GAP:
            self._fetching.begin(node_id, partial(self._fetch, node_id))

    def tidy(self) -> None:
        """Forget the blocks of nodes that nobody has heard of for long."""
        for node_id in [each for each in self._index.nodes if self._nodes.state(each) is None]:
            self._index.forget(node_id)

    async def stop(self) -> None:
        """Fetch nothing more."""
        await self._fetching.stop()

    async def _fetch(self, node_id: NodeId) -> None:
        for _ in range(TRIES):
            state = self._nodes.state(node_id)
            try:
                if state is None or not state.kvstore_address:
                    raise Unavailable("the node has not said where its kvstore is")
                found = await self._lists.list_blocks(state.kvstore_address)
                if self._index.replace(node_id, found.incarnation, found.sequence, found.keys) is Heard.APPLIED:
                    log.info("blocks_listed", node=node_id, keys=len(found.keys))
                    return
            except Unavailable as error:
                log.info("blocks_not_listed", node=node_id, reason=error.message)
            await self._clock.sleep_ms(PAUSE_MS)

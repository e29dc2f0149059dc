"""`BlockLists` that a test fills: address → list. An address that is not there is a kvstore that is away."""

from roundhouse.errors import Unavailable
from services.scheduler.ports import BlockList


class FakeBlockLists:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.lists: dict[str, BlockList] = {}
        self.asked: list[str] = []

    async def list_blocks(self, address: str) -> BlockList:
        self.asked.append(address)
        if address not in self.lists:
            raise Unavailable("the kvstore is away")
        return self.lists[address]

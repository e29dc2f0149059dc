"""One generation over two instances: the prompt and the first token on one, the rest on the other.

```
prefill node   phase "prefill", block after block --first token--> client, finish "handoff"
   kvstore       | the prompt's blocks, held under a handle
   kvstore       v each as it is computed
decode node    phase "decode", resumed from the first token, once the last block is here --> client
```

The hold ends when decode's node has the blocks, with the request, or by itself. A lost hold, a lost block or a slow
transfer is a miss: decode computes what it lacks, and the text is the same.
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from roundhouse.errors import EngineFailed
from roundhouse.wire.v1.scheduling_pb2 import Placement
from services.gateway.operations.call_progress import token_ids_of
from services.gateway.ports import (
    HANDOFF,
    BlockHolds,
    BlockTransfer,
    EngineChunk,
    EngineRequest,
    HeldBlocks,
    InferenceNode,
    TensorReply,
    TensorRequest,
)


class HandingOver:
    """`InferenceNode` for a grant of two placements; `generate` gets the one that decodes."""

    def __init__(
        self,
        node: InferenceNode,
        holds: BlockHolds,
        prefill: Placement,
        held: HeldBlocks,
        on_handoff: Callable[[], None],
        on_resumed: Callable[[], None],
    ) -> None:
        """`on_handoff` is called when decode is asked, `on_resumed` at what comes first of it."""
        self._node = node
        self._holds = holds
        self._prefill = prefill
        self._held = held
        self._begun = 0
        self._on_handoff = on_handoff
        self._on_resumed = on_resumed

    async def generate(
        self, placement: Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """See `InferenceNode.generate`. What was begun before, or is no generation, runs on the decode instance."""
        if request.phase != "full" or not request.return_token_ids:
            self._on_handoff()
            async for chunk in self._node.generate(placement, request, timeout_ms=timeout_ms):
                yield chunk
            return
        held = self._held_for(request)
        transfer = self._holds.begin(self._prefill.kvstore_address, placement.kvstore_address, held)
        try:
            async with aclosing(self._over_two(placement, request, timeout_ms, transfer, held.handle)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            transfer.end()

    def _held_for(self, request: EngineRequest) -> HeldBlocks:
        """Of one call: under a name of its own, so that it ends no other's; keys are known of one prompt only."""
        self._begun += 1
        handle = self._held.handle if self._begun == 1 else f"{self._held.handle}/{self._begun}"
        is_its_prompt = tuple(request.prompt_token_ids) == self._held.prompt
        return replace(self._held, handle=handle, keys=self._held.keys if is_its_prompt else ())

    async def _over_two(
        self, placement: Placement, request: EngineRequest, timeout_ms: int, transfer: BlockTransfer, handle: str
    ) -> AsyncGenerator[EngineChunk, None]:
        token_ids, handed = b"", False
        first = self._node.generate(self._prefill, replace(request, phase="prefill"), timeout_ms=timeout_ms)
        async with aclosing(first) as chunks:
            async for chunk in chunks:
                token_ids += chunk.token_ids
                handed = chunk.finish_reason == HANDOFF
                if handed:
                    transfer.prefilled()
                yield replace(chunk, finish_reason=None) if handed else chunk
        if not handed:
            return
        if not token_ids:
            raise EngineFailed("The prefill named no token to go on from.")
        self._on_handoff()
        rest = replace(
            request,
            phase="decode",
            resumed_token_ids=token_ids_of(token_ids),
            kv_peers=(self._prefill.kvstore_address,) if self._prefill.kvstore_address else (),
            kv_hold=handle,
        )
        resumed = False
        async with aclosing(self._node.generate(placement, rest, timeout_ms=timeout_ms)) as chunks:
            async for chunk in chunks:
                if not resumed:
                    resumed = True
                    self._on_resumed()
                # The prompt was counted where it ran; here it comes out of the cache because of the handing over.
                yield replace(chunk, input_tokens=None, cached_tokens=None)

    async def infer(self, placement: Placement, request: TensorRequest, *, timeout_ms: int) -> TensorReply:
        """See `InferenceNode.infer`: tensors have no prefill."""
        return await self._node.infer(placement, request, timeout_ms=timeout_ms)

"""How much else a step does beside streams that decode: a part of what the step itself takes, so that nobody's next
token waits long for another's prompt.

Copies of found blocks are paced by the clock. What is left of a found prompt, less than a block of tokens, is computed
a row tile at a time: a step computes that many rows anyway. Alone, nothing is held back. Whole prompts are paced by
`EngineLimits.prefill_chunk_tokens`.
"""

from __future__ import annotations

from engines.reference.paged_kv import BLOCK_TOKENS
from engines.reference.tiled_matmul import ROW_TILE

IMPORT_BYTES_ALONE = 8 << 20  # about 2 ms; cancellations and new requests are looked at between steps
IMPORT_BYTES_A_MS = 4 << 20  # copied out of shared memory and checked; measured at 4 GB/s with cold pages
IMPORT_SHARE = 0.25  # of a decode step: a guess at what is not noticed between two tokens
DECODE_WEIGHT = 0.05  # of one step in the moving average: about the last twenty


class Pace:
    """Learns how long a step takes that only decodes."""

    def __init__(self) -> None:
        """Nothing has been measured."""
        self.decode_ms = 0.0

    def decoded(self, took_ms: float) -> None:
        """A step computed one token for each running request, and nothing else."""
        self.decode_ms += (DECODE_WEIGHT if self.decode_ms else 1.0) * (took_ms - self.decode_ms)

    def import_bytes(self, *, beside_streams: bool) -> int:
        """To be copied in the next step; at least a block is, however little this says."""
        if not beside_streams:
            return IMPORT_BYTES_ALONE
        return min(IMPORT_BYTES_ALONE, int(IMPORT_SHARE * self.decode_ms * IMPORT_BYTES_A_MS))


def tokens_at_once(uncomputed: int, *, found: bool, beside_streams: bool) -> int:
    """How many of a request's uncomputed tokens the next step may take; `found`: what was before them is no work."""
    is_rest = found and uncomputed <= BLOCK_TOKENS
    return min(uncomputed, ROW_TILE) if is_rest and beside_streams else uncomputed

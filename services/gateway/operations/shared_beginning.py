"""Which beginning of a prompt lies in a sharing group's cache space instead of the tenant's own.

Only what the group has declared is shared, and only among tenants that chose the group and that it lists: the tokens
that a prompt has in common with a declared prompt, made by the same template and tokenizer. All of them are tokens that
every member knows, so a member that finds them cached learns nothing of another's own text; a single token more would
be keyed with the tenant's salt. Decision: docs/decisions/0059-sharing-groups.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roundhouse.block_keys import SharedBeginning, group_salt
from roundhouse.catalogue.store import CatalogueView
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import TenantId
from services.gateway.ports import TextCodec

KEPT_MAX = 256  # declared prompts as tokens; a group has at most 16, a model version one tokenizer


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """The leading tokens of a prompt that are a group's, and its salt; `tokens` 0 = none."""

    salt: bytes = b""
    tokens: int = 0

    def blocks(self, block_tokens: int) -> SharedBeginning:
        """The whole blocks of it."""
        blocks = self.tokens // block_tokens
        return SharedBeginning(self.salt if blocks else b"", blocks)


NOTHING_SHARED = SharedTokens()


class SharedBeginnings:
    """The declared prompts of all groups as tokens, made when first needed."""

    def __init__(self, catalogue: CatalogueView, cluster: str) -> None:
        """`cluster` is what salts are made with."""
        self._catalogue = catalogue
        self._cluster = cluster
        self._kept: dict[tuple[TextCodec, str, bool], tuple[int, ...]] = {}

    async def of(self, tenant: TenantId, codec: TextCodec, token_ids: Sequence[int], *, chat: bool) -> SharedTokens:
        """What a prompt shares; nothing for a tenant without a group that accepts it. Raises Unavailable."""
        group = self._catalogue.current.sharing_group_of(tenant)
        if group is None:
            return NOTHING_SHARED
        declared = [await self._tokens(codec, prompt, chat) for prompt in group.prompts]
        tokens = max(_in_common(token_ids, each) for each in declared)
        return SharedTokens(group_salt(self._cluster, group.name), tokens) if tokens else NOTHING_SHARED

    async def _tokens(self, codec: TextCodec, prompt: str, chat: bool) -> tuple[int, ...]:
        known = self._kept.get((codec, prompt, chat))
        if known is None:
            known = await _encoded(codec, prompt, chat)
            while len(self._kept) >= KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[codec, prompt, chat] = known
        return known


async def _encoded(codec: TextCodec, prompt: str, chat: bool) -> tuple[int, ...]:
    if not chat:
        return (await codec.encode([prompt], add_special_tokens=True))[0]
    try:
        text = await codec.render_chat([{"role": "system", "content": prompt}], None)
    except InvalidInput:  # a template without a system role shares nothing
        return ()
    return (await codec.encode([text], add_special_tokens=False))[0]


def _in_common(some: Sequence[int], others: Sequence[int]) -> int:
    for number, (one, other) in enumerate(zip(some, others, strict=False)):
        if one != other:
            return number
    return min(len(some), len(others))

"""What of a prompt a sharing group shares: declared tokens, among tenants that chose the group and that it lists."""

from collections.abc import Sequence

import pytest

from roundhouse.block_keys import OWN_SPACE_ONLY, group_salt
from roundhouse.catalogue.records import Catalogue, SharingGroup, Tenant
from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import TenantId
from services.gateway.operations.shared_beginning import NOTHING_SHARED, SharedBeginnings

SYSTEM = "You are helpful. " * 4
IN, CHOSE, LISTED, OUT = (TenantId(name) for name in ("in", "chose", "listed", "out"))
CATALOGUE = Catalogue(
    tenants={
        IN: Tenant(name=IN, sharing_group="g"),
        CHOSE: Tenant(name=CHOSE, sharing_group="g"),  # and the group does not list it
        LISTED: Tenant(name=LISTED),  # and it did not choose the group
        OUT: Tenant(name=OUT),
    },
    sharing_groups={"g": SharingGroup(name="g", tenants=(IN, LISTED), prompts=("short", SYSTEM))},
)


class View:
    """The catalogue, fixed."""

    current = CATALOGUE

    def subscribe(self, listener: object) -> None:
        """Nothing changes."""

    async def refresh(self) -> None:
        """Nothing is newer."""


class LetterCodec:
    """One token a letter; a chat is `<role>text` for each message and `<assistant>`."""

    vocabulary_size = 256
    renders_tools = False

    def __init__(self, *, has_system: bool = True) -> None:
        self.has_system = has_system
        self.encoded = 0

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """The letters."""
        self.encoded += 1
        return [tuple(text.encode()) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The letters again."""
        return bytes(token_ids).decode()

    def without_leading(self, text: str, token_ids: Sequence[int]) -> str:
        """There are none."""
        return text

    def with_leading(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """There are none."""
        return tuple(token_ids)

    async def render_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> str:
        """Raises InvalidInput for a system message if there is no place for one."""
        if not self.has_system:
            raise InvalidInput("no system role")
        return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"  # type: ignore[index]


def chat_of(system: str, user: str) -> tuple[int, ...]:
    """Tokens of a chat."""
    return tuple(f"<system>{system}<user>{user}<assistant>".encode())


@pytest.fixture
def beginnings() -> SharedBeginnings:
    """Over the catalogue above."""
    return SharedBeginnings(View(), "cluster")


async def test_the_declared_system_prompt_is_shared_and_not_a_token_more(beginnings: SharedBeginnings) -> None:
    """`<system>` is 8 tokens and the declared prompt 68: 76, and `<` of the next message, which the declared prompt's
    own `<assistant>` begins with too: 77. 77 tokens are floor(77/16) = 4 blocks."""
    shared = await beginnings.of(IN, LetterCodec(), chat_of(SYSTEM, "secret"), chat=True)
    assert (shared.salt, shared.tokens) == (group_salt("cluster", "g"), 8 + 17 * 4 + 1)
    assert shared.blocks(16) == (group_salt("cluster", "g"), 4)


@pytest.mark.parametrize("tenant", [CHOSE, LISTED, OUT, TenantId("unknown")])
async def test_who_did_not_choose_or_is_not_listed_shares_nothing(
    beginnings: SharedBeginnings, tenant: TenantId
) -> None:
    """Mutual opt-in: one side alone is not enough."""
    assert await beginnings.of(tenant, LetterCodec(), chat_of(SYSTEM, "x"), chat=True) == NOTHING_SHARED


async def test_another_system_prompt_shares_only_what_it_has_in_common(beginnings: SharedBeginnings) -> None:
    """`<system>You are ` are 16 tokens, then it goes its own way; a prompt without any declared text shares the
    template's first 8 tokens, which make no block."""
    shared = await beginnings.of(IN, LetterCodec(), chat_of("You are a pirate of tenant one.", "x"), chat=True)
    assert shared.tokens == 16
    own = await beginnings.of(IN, LetterCodec(), chat_of("private", "x"), chat=True)
    assert (own.tokens, own.blocks(16)) == (8, OWN_SPACE_ONLY)


async def test_a_completion_shares_its_beginning(beginnings: SharedBeginnings) -> None:
    """Without a template: the 68 letters of the declared prompt."""
    shared = await beginnings.of(IN, LetterCodec(), tuple((SYSTEM + "go on").encode()), chat=False)
    assert shared.tokens == 68


async def test_a_template_without_a_system_role_shares_nothing(beginnings: SharedBeginnings) -> None:
    """The declared prompt cannot be rendered, which is no error of the caller."""
    codec = LetterCodec(has_system=False)
    assert await beginnings.of(IN, codec, chat_of(SYSTEM, "x"), chat=True) == NOTHING_SHARED


async def test_declared_prompts_are_encoded_once(beginnings: SharedBeginnings) -> None:
    """Two prompts, ten requests: two encodings."""
    codec = LetterCodec()
    for _ in range(10):
        await beginnings.of(IN, codec, chat_of(SYSTEM, "x"), chat=True)
    assert codec.encoded == 2

"""LangChain's chat model and embeddings as people use them, against a gateway."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, RunningGateway


@pytest.fixture
async def clients() -> AsyncIterator[dict[str, Any]]:
    """HTTP clients for LangChain, which does not close those it makes itself."""
    with httpx.Client() as http_client:
        async with httpx.AsyncClient() as http_async_client:
            yield {"http_client": http_client, "http_async_client": http_async_client}


@pytest.fixture
def chat(gateway: RunningGateway, clients: dict[str, Any]) -> ChatOpenAI:
    """A chat model as the documentation makes it."""
    return ChatOpenAI(
        model="m", base_url=f"{gateway.url}/v1", api_key=KEYS["t1"], max_tokens=3, max_retries=0, **clients
    )


async def test_a_chat_is_invoked(chat: ChatOpenAI) -> None:
    """Text, finish reason and usage; a conversation of several messages and roles."""
    answer = await chat.ainvoke(
        [SystemMessage("be brief"), HumanMessage("hi"), AIMessage("yes?"), HumanMessage("go on")]
    )
    assert answer.content == "tok0 tok1 tok2 "
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 3


async def test_a_chat_is_streamed(chat: ChatOpenAI) -> None:
    """Chunk by chunk, with the usage at the end."""
    chunks = [chunk async for chunk in chat.astream("hi", stream_usage=True)]
    assert "".join(str(chunk.content) for chunk in chunks) == "tok0 tok1 tok2 "
    assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [3]


async def test_chats_are_batched(chat: ChatOpenAI, node: FakeNode) -> None:
    """Several at once, each with its own answer."""
    answers = await chat.abatch(["one", "two", "three"])
    assert [answer.content for answer in answers] == ["tok0 tok1 tok2 "] * 3
    assert len(node.calls) == 3


async def test_texts_are_embedded(gateway: RunningGateway, clients: dict[str, Any]) -> None:
    """The way that sends texts, and the one that sends token ids would need OpenAI's own tokenizer."""
    embeddings = OpenAIEmbeddings(
        model="m",
        base_url=f"{gateway.url}/v1",  # type: ignore[call-arg]  # an alias
        api_key=KEYS["t1"],
        check_embedding_ctx_length=False,
        **clients,
    )
    assert await embeddings.aembed_documents(["a", "b"]) == [[0.5, -0.25, 1.0]] * 2

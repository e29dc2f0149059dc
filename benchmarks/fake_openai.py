"""An OpenAI-compatible server without a model, as a process: `python -m benchmarks.fake_openai PORT TOKENS`.

`/v1/chat/completions` answers `TOKENS` tokens with no delay: as one event each in a stream, else as one body. It is
written on bare sockets so that it costs next to nothing: the limit that gateways are measured against.
"""

import asyncio
import json
import sys
from typing import cast

import uvloop

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(choice: dict[str, object]) -> bytes:
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "fast", "choices": [choice]}
    return _chunk(b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n")


def _stream(tokens: int) -> list[bytes]:
    """The pieces of a stream, one a token, the header before and the end after."""
    role: dict[str, object] = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    pieces = [_STREAM_HEAD + _event(role)]
    pieces += [
        _event({"index": 0, "delta": {"content": f"tok{number} "}, "finish_reason": None}) for number in range(tokens)
    ]
    end = _event({"index": 0, "delta": {}, "finish_reason": "length"})
    return [*pieces, end + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"]


def _whole(tokens: int) -> bytes:
    text = "".join(f"tok{number} " for number in range(tokens))
    message = {"role": "assistant", "content": text}
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "fast",
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3},
        }
    ).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


class FakeOpenAI(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, tokens: int) -> None:
        self._stream = _stream(tokens)
        self._whole = _whole(tokens)
        self._data = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._data += data
        while (head_end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:head_end].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
            if len(self._data) < head_end + 4 + length:
                return
            body, self._data = self._data[head_end + 4 : head_end + 4 + length], self._data[head_end + 4 + length :]
            self._answer(bool(json.loads(body or b"{}").get("stream")))

    def _answer(self, stream: bool) -> None:
        assert self._transport is not None
        if not stream:
            self._transport.write(self._whole)
            return
        for piece in self._stream:
            self._transport.write(piece)


async def serve(port: int, tokens: int) -> None:
    """Serve until the process ends."""
    server = await asyncio.get_running_loop().create_server(lambda: FakeOpenAI(tokens), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))

"""What a language-model instance sends, read fast: all messages that are ready together become one chunk.

Messages of one model begin with few different heads (names, types and shapes of the outputs); the first with a head is
read by protobuf, those that begin like it only by the lengths of their contents, anything else by protobuf.
Most of those differ from the one before in their text alone: what stands before and behind it is compared, not read.
Source: the KServe v2 gRPC messages and the encoding of protobuf.
"""

from collections.abc import Sequence
from dataclasses import replace

from tritonclient.grpc import service_pb2 as kserve

from services.gateway.adapters.triton_tensors import chunk_of, chunk_of_contents
from services.gateway.ports import EngineChunk

_ANY_ID = b"\0" * 32  # as long as our ids, which are in no other place of a head
HEADS_MAX = 8  # of one model: its first, middle and last messages, and some to spare
_ELEMENT_BYTES = 4  # the length before an element of a BYTES tensor
_CONTENTS_TAG = 0x32  # ModelInferResponse.raw_output_contents = 6, length-delimited


class KnownHeads:
    """What messages of one model begin with, learnt by one stream and used by the next ones. Bounded.

    A head is all of a ModelInferResponse up to its first content. It may hold the id of the request."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[str, ...]] = {}  # with `_ANY_ID` in place of an id → names of the outputs

    def of(self, request_id: bytes) -> dict[bytes, tuple[str, ...]]:
        """The heads as they are in a stream with this id."""
        return {head.replace(_ANY_ID, request_id): names for head, names in self._heads.items()}

    def learn(self, head: bytes, names: tuple[str, ...], request_id: bytes) -> None:
        """Remember a head."""
        if len(request_id) == len(_ANY_ID) and len(self._heads) < HEADS_MAX:
            self._heads[head.replace(request_id, _ANY_ID)] = names


class ChunkReading:
    """Reads the messages of one stream."""

    def __init__(self, request_id: str = "", known: KnownHeads | None = None) -> None:
        self._request_id = request_id.encode()
        self._known = known or KnownHeads()
        self._heads = self._known.of(self._request_id)
        self._lead, self._tail = (
            b"",
            b"",
        )  # of one that only adds text: what stands before the text's length, and after it
        self._alike: EngineChunk | None = None  # what such a message says besides its text

    def chunk(self, messages: Sequence[bytes]) -> tuple[EngineChunk | None, str]:
        """What the messages say together, and the engine's error if it has ended with one.

        Raises protobuf's DecodeError for what is no message of the protocol."""
        chunks: list[EngineChunk] = []
        texts: list[bytes] = []  # of messages in a row that only add text
        for message in messages:
            if self._alike is not None and (text := self._added_text(message)) is not None:
                texts.append(text)
                continue
            if texts:
                chunks.append(self._chunk_of_texts(texts))
                texts = []
            chunk, error = self._one(message)
            if error:
                return _joined(chunks), error
            if chunk is not None:
                chunks.append(chunk)
        if texts:
            chunks.append(self._chunk_of_texts(texts))
        return _joined(chunks), ""

    def _one(self, message: bytes) -> tuple[EngineChunk | None, str]:
        contents = self._contents(message)
        if contents is not None:
            names, head, values = contents
            chunk = chunk_of_contents(names, values)
            self._learn(names, head, values, chunk)
            return chunk, ""
        reply = kserve.ModelStreamInferResponse.FromString(message)
        if reply.error_message:
            return None, str(reply.error_message)
        response = reply.infer_response
        if not response.outputs:  # it only marks the end
            return None, ""
        self._remember(response)
        return chunk_of(response), ""

    def _contents(self, message: bytes) -> tuple[tuple[str, ...], bytes, list[bytes]] | None:
        """Names, head and contents of a message that begins as one before did; None for every other."""
        if not self._heads or message[:1] != b"\x12":
            return None
        size, at = _varint(message, 1)
        if at + size != len(message):
            return None
        for head, names in self._heads.items():
            if message.startswith(head, at):
                contents = _contents_from(message, at + len(head))
                if contents is not None and len(contents) == len(names):
                    return names, head, contents
        return None

    def _learn(self, names: tuple[str, ...], head: bytes, contents: list[bytes], chunk: EngineChunk) -> None:
        """Keep what stands around the text of a message that only adds text."""
        says_more = chunk.finish_reason or chunk.logprobs or chunk.token_ids or chunk.embedding
        if says_more or chunk.cached_tokens is not None or "text_output" not in names:
            return
        at = names.index("text_output")
        encoded = [bytes((_CONTENTS_TAG,)) + _length(len(content)) + content for content in contents]
        self._lead = head + b"".join(encoded[:at]) + bytes((_CONTENTS_TAG,))
        self._tail = b"".join(encoded[at + 1 :])
        self._alike = chunk

    def _added_text(self, message: bytes) -> bytes | None:
        """The text of a message that is like the one learnt from; None for every other. UTF-8."""
        if message[:1] != b"\x12":
            return None
        size, at = _varint(message, 1)
        if at + size != len(message) or not message.startswith(self._lead, at) or not message.endswith(self._tail):
            return None
        length, begin = _varint(message, at + len(self._lead))
        end = begin + length
        if end + len(self._tail) != len(message) or length < _ELEMENT_BYTES:
            return None
        begin += _ELEMENT_BYTES
        is_one = int.from_bytes(message[begin - _ELEMENT_BYTES : begin], "little") == end - begin
        return message[begin:end] if is_one else None

    def _chunk_of_texts(self, texts: list[bytes]) -> EngineChunk:
        assert self._alike is not None
        text = "".join([text.decode("utf-8", "replace") for text in texts])
        return replace(self._alike, text=text, output_tokens=self._alike.output_tokens * len(texts))

    def _remember(self, response: kserve.ModelInferResponse) -> None:
        head = kserve.ModelInferResponse()
        head.CopyFrom(response)
        del head.raw_output_contents[:]
        data, names = head.SerializeToString(), tuple(output.name for output in response.outputs)
        self._heads[data] = names
        self._known.learn(data, names, self._request_id)


def _contents_from(message: bytes, at: int) -> list[bytes] | None:
    """The contents from `at` to the end; None if something else is there."""
    contents: list[bytes] = []
    while at < len(message):
        if message[at] != _CONTENTS_TAG:
            return None
        length, at = _varint(message, at + 1)
        contents.append(message[at : at + length])
        at += length
    return contents if at == len(message) else None


def _length(value: int) -> bytes:
    """A number as protobuf writes it."""
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at `at`, and where it ends. Raises IndexError if it is cut off."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7


def _joined(chunks: list[EngineChunk]) -> EngineChunk | None:
    """One chunk of several that came together; the counts of the prompt are those that came first."""
    if len(chunks) < 2:
        return chunks[0] if chunks else None
    cached = next((chunk.cached_tokens for chunk in chunks if chunk.cached_tokens is not None), None)
    vectors = [chunk.embedding for chunk in chunks if chunk.embedding is not None]
    return replace(
        chunks[0],
        text="".join([chunk.text for chunk in chunks]),
        output_tokens=sum([chunk.output_tokens for chunk in chunks]),
        cached_tokens=cached,
        finish_reason=chunks[-1].finish_reason,
        logprobs=_joined_lists([chunk.logprobs for chunk in chunks if chunk.logprobs]),
        embedding=vectors[-1] if vectors else None,
        token_ids=b"".join([chunk.token_ids for chunk in chunks]),
    )


def _joined_lists(texts: list[str]) -> str | None:
    """Several JSON lists as one."""
    inner = [text.strip()[1:-1] for text in texts]
    return f"[{','.join(part for part in inner if part.strip())}]" if texts else None

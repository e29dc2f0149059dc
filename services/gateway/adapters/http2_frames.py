"""HTTP/2 frames as far as a gRPC client needs them: making those it sends, and the numbers of those it reads.

Pure. Header blocks that are sent use neither the dynamic table nor Huffman coding, so that the part that never changes
is encoded once. Source: RFC 9113 (frames), RFC 7541 (HPACK), the gRPC over HTTP/2 protocol description.
"""

import struct
from collections.abc import Sequence

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20

SETTING_HEADER_TABLE_SIZE, SETTING_ENABLE_PUSH, SETTING_MAX_CONCURRENT_STREAMS = 1, 2, 3
SETTING_INITIAL_WINDOW_SIZE, SETTING_MAX_FRAME_SIZE = 4, 5

REFUSED_STREAM, CANCEL = 0x7, 0x8
DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
WINDOW_MAX = 2**31 - 1
HEADER_BYTES = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_HEAD = struct.Struct(">HBBBI")
_SETTING = struct.Struct(">HI")
_UINT32 = struct.Struct(">I")
_MESSAGE_HEAD = struct.Struct(">BI")
MESSAGE_HEAD_BYTES = 5


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    size = len(payload)
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def frame_head(data: bytes | bytearray, at: int) -> tuple[int, int, int, int]:
    """Length, kind, flags and stream of the frame that begins at `at`."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return (high << 8) | low, kind, flags, stream & WINDOW_MAX


def settings_frame(values: Sequence[tuple[int, int]]) -> bytes:
    """Our settings."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(number, value) for number, value in values))


def settings_of(payload: bytes) -> list[tuple[int, int]]:
    """The peer's settings. A length that is no multiple of six raises struct.error."""
    return list(_SETTING.iter_unpack(payload))


def window_update(stream: int, octets: int) -> bytes:
    """More room for what the peer sends."""
    return frame(WINDOW_UPDATE, 0, stream, _UINT32.pack(octets))


def reset(stream: int, code: int) -> bytes:
    """End a stream at once."""
    return frame(RST_STREAM, 0, stream, _UINT32.pack(code))


def uint32(payload: bytes) -> int:
    """The number in a WINDOW_UPDATE or RST_STREAM, without the reserved bit."""
    return int(_UINT32.unpack_from(payload)[0]) & WINDOW_MAX


def unpadded(payload: bytes, flags: int) -> bytes:
    """The content of a DATA or HEADERS frame. Raises ValueError for padding that is longer than the frame."""
    start, end = 0, len(payload)
    if flags & PADDED:
        start, end = 1, end - payload[0]
    if flags & PRIORITY:
        start += 5
    if start > end:
        raise ValueError("a frame's padding is longer than the frame")
    return payload[start:end]


def message(data: bytes) -> bytes:
    """A gRPC message with its prefix: not compressed."""
    return _MESSAGE_HEAD.pack(0, len(data)) + data


def message_head(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """Whether the message at `at` is compressed, and its length."""
    compressed, size = _MESSAGE_HEAD.unpack_from(data, at)
    return compressed, size


def header_block(headers: Sequence[tuple[str, str]]) -> bytes:
    """Headers as literals that are not indexed."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in headers)


def _string(text: str) -> bytes:
    data = text.encode()
    return _integer(len(data)) + data


def _integer(value: int) -> bytes:
    """An integer with a prefix of 7 bits, whose first bit is 0 (RFC 7541, 5.1)."""
    if value < 127:
        return bytes((value,))
    rest, encoded = value - 127, bytearray((127,))
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)

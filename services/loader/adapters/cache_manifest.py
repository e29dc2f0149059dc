"""What the disk cache writes beside a version, and the names it gives to contents."""

import os
from pathlib import Path

import msgspec

from roundhouse.errors import InvalidInput
from roundhouse.vocabulary import Digest


class ManifestFile(msgspec.Struct, frozen=True):
    """One verified file, as it was when it was verified."""

    name: str
    size: int
    mtime_ns: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a version consists of."""

    digest: str
    is_single_file: bool
    files: list[ManifestFile]


_decode = msgspec.json.Decoder(Manifest).decode


def read_manifest(folder: Path) -> tuple[Manifest, int]:
    """The manifest of a version's folder, and when it was last used (Unix ms). Raises OSError, MsgspecError."""
    path = folder / "manifest.json"
    return _decode(path.read_bytes()), path.stat().st_mtime_ns // 1_000_000


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and have it on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hex_of(digest: Digest) -> str:
    """The digest as a name in the file system. Raises InvalidInput: it is no digest, and so no safe name."""
    algorithm, _, hexadecimal = digest.partition(":")
    if algorithm != "sha256" or len(hexadecimal) != 64 or set(hexadecimal) - set("0123456789abcdef"):
        raise InvalidInput("a digest is sha256: and 64 hexadecimal digits")
    return hexadecimal

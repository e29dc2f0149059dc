"""Digests change with every byte and name, and with nothing else; unchanged files are not read twice."""

import os
from hashlib import sha256
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import DigestCache, FileEntry, digest_of_entries, version_digest, version_files
from roundhouse.errors import InvalidInput, NotFound

LONG_AGO_S = 1_000_000_000


def folder(root: Path, files: dict[str, bytes]) -> Path:
    """A version's folder whose files were last changed long ago."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        os.utime(path, (LONG_AGO_S, LONG_AGO_S))
    return root


def test_the_digest_is_over_tagged_and_length_prefixed_fields(tmp_path: Path) -> None:
    """The format is a contract with everyone who computes it: spelled out here, field by field."""
    version = folder(tmp_path / "v", {"b": b"22", "a/c": b"1"})

    def text(value: bytes) -> bytes:
        return len(value).to_bytes(8, "big") + value

    expected = sha256(
        text(b"roundhouse/version/v1")
        + text(b"a/c")
        + (1).to_bytes(8, "big")
        + sha256(b"1").digest()
        + text(b"b")
        + (2).to_bytes(8, "big")
        + sha256(b"22").digest()
    ).hexdigest()
    assert version_digest(version) == f"sha256:{expected}"


@pytest.mark.parametrize(
    "other",
    [
        {"a": b"12", "b": b"3"},
        {"a": b"1", "b": b"2"},
        {"a": b"1", "c": b"23"},
        {"a": b"1", "b": b"23", "d": b""},
        {"a": b"1"},
        {"x/a": b"1", "b": b"23"},
    ],
)
def test_every_difference_of_names_or_contents_shows(tmp_path: Path, other: dict[str, bytes]) -> None:
    """Invariant 10: what moved from one file to the next, was renamed, added or lost is another version."""
    one = version_digest(folder(tmp_path / "one", {"a": b"1", "b": b"23"}))
    assert version_digest(folder(tmp_path / "two", other)) != one


def test_a_copy_has_the_digest_of_its_original(tmp_path: Path) -> None:
    """Times, owners and the folder's name are not part of a version."""
    files = {"a": b"1", "b": b"23"}
    one, two = folder(tmp_path / "one", files), folder(tmp_path / "two", files)
    os.utime(two / "a", (LONG_AGO_S + 5, LONG_AGO_S + 5))
    assert version_digest(one) == version_digest(two)


def test_entries_hashed_elsewhere_give_the_same_digest(tmp_path: Path) -> None:
    """A loader that hashes while it copies comes to the same value, in whatever order it copied."""
    version = folder(tmp_path / "v", {"b": b"22", "a": b"1"})
    entries = [FileEntry("b", 2, sha256(b"22").digest()), FileEntry("a", 1, sha256(b"1").digest())]
    assert digest_of_entries(entries) == version_digest(version)


def test_one_file_may_be_a_version(tmp_path: Path) -> None:
    """Its own name counts, as it would in a folder."""
    version = folder(tmp_path / "v", {"model.onnx": b"x"})
    assert version_digest(version / "model.onnx") == version_digest(version)


def test_unchanged_files_are_not_read_again(tmp_path: Path) -> None:
    """Applying hundreds of versions again costs a look at each file: here the bytes are even swapped unseen."""
    version, cache = folder(tmp_path / "v", {"a": b"1"}), DigestCache()
    first = version_digest(version, cache=cache)
    read: list[int] = []
    assert version_digest(version, cache=cache, progress=read.append) == first
    assert read == [1]  # progress counts what is done, read or known


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    """Even with the old size and the old time stamp put back: the change time gives it away."""
    version, cache = folder(tmp_path / "v", {"a": b"1"}), DigestCache()
    first = version_digest(version, cache=cache)
    folder(version, {"a": b"2"})
    assert version_digest(version, cache=cache) != first


def test_a_file_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    """It may change again within the same tick of its time stamp."""
    (tmp_path / "a").write_bytes(b"1")
    cache = DigestCache()
    version_digest(tmp_path, cache=cache)
    assert cache._hashes == {}


def test_the_cache_is_bounded() -> None:
    """The oldest entry goes first."""
    cache = DigestCache(entries_max=2)
    identities = [(name, 1, 1, 1, 1, 1) for name in "abc"]
    for identity in identities:
        cache.put(identity, b"h")
    assert [cache.get(identity) for identity in identities] == [None, b"h", b"h"]


def test_links_to_files_are_files_and_links_to_folders_are_refused(tmp_path: Path) -> None:
    """Model hubs keep files as links into a store; a linked folder could lead anywhere, and round in circles."""
    plain = folder(tmp_path / "plain", {"a": b"1"})
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "a").symlink_to(plain / "a")
    assert version_digest(linked) == version_digest(plain)
    (linked / "loop").symlink_to(linked)
    with pytest.raises(InvalidInput, match="link to a folder"):
        version_files(linked)


def test_what_cannot_be_a_version_is_refused(tmp_path: Path) -> None:
    """Nothing there, an empty folder, a broken link, a pipe."""
    with pytest.raises(NotFound):
        version_digest(tmp_path / "gone")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InvalidInput):
        version_digest(empty)
    (empty / "broken").symlink_to(empty / "nowhere")
    with pytest.raises(NotFound):
        version_digest(empty)
    (empty / "broken").unlink()
    os.mkfifo(empty / "pipe")
    with pytest.raises(InvalidInput):
        version_digest(empty)

"""What only the real disk cache has: files, names, time stamps, a lock, and what a killed process left."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import FileEntry, digest_of_entries, version_digest, version_entries
from roundhouse.catalogue.records import ContentFile
from roundhouse.clock import SystemClock
from roundhouse.errors import InvalidInput, NotFound, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters import disk_cache, file_copy
from services.loader.adapters.direct_io import CHUNK_BYTES
from services.loader.adapters.disk_cache import FILES_AT_ONCE, REPORT_BYTES, DiskCache
from services.loader.adapters.folder_source import FileReader
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic
from services.loader.ports import CachedVersion, StageRequest

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5, 7, 8, 9, 10, 11]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A version of one file in a folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "weights").write_bytes(b"12345")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[DiskCache]:
    """Not started yet."""
    made = DiskCache(tmp_path / "cache", SystemClock())
    yield made
    made.close()


def files_of(folder: Path) -> tuple[ContentFile, ...]:
    """What the catalogue lists of a version."""
    return tuple(
        ContentFile(name=each.name, size=each.size, sha256=each.sha256.hex()) for each in version_entries(folder)
    )


async def stage(cache: DiskCache, source: Path, reports: "list[int] | None" = None) -> CachedVersion:
    """Stage what lies in a folder now, as the catalogue lists it."""
    request = StageRequest(str(source), version_digest(source), files_of(source), 10 * sum(SIZES))
    with Traffic().lane(Priority.DEMAND) as lane:
        return await cache.stage(request, lane, lambda done: (reports if reports is not None else []).append(done))


def stored(folder: Path) -> set[str]:
    """Contents in the cache."""
    return {path.name for path in (folder / "cache" / "files").glob("*/*")}


async def test_the_copy_has_the_digest_of_the_source(cache: DiskCache, tmp_path: Path) -> None:
    """Invariant 10: files around the size of a chunk, more than threads, through buffers that are used again."""
    await cache.start()
    source = tmp_path / "many"
    source.mkdir()
    for number, size in enumerate(SIZES):
        (source / f"shard-{number:02}").write_bytes(bytes([number]) * size)
    assert len(SIZES) > FILES_AT_ONCE
    reports: list[int] = []
    staged = await stage(cache, source, reports)
    assert version_digest(staged.path) == version_digest(source)
    await asyncio.sleep(0)
    assert reports == sorted(set(reports))
    assert reports[-1] >= sum(SIZES) - REPORT_BYTES


async def test_a_version_of_one_file_is_given_as_that_file(cache: DiskCache, source: Path) -> None:
    """An `.onnx` file stays a file with its own name."""
    await cache.start()
    staged = await stage(cache, source / "weights")
    assert staged.path.name == "weights"
    assert staged.path.read_bytes() == b"12345"


async def test_versions_share_files_and_a_fine_tune_fetches_only_its_own(
    cache: DiskCache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions with one file in common: it is fetched once, stored once, and stays until nobody has it."""
    await cache.start()
    (source / "head").write_bytes(b"first")
    first = await stage(cache, source)
    fetched = opened_paths(monkeypatch)
    (source / "head").write_bytes(b"other")
    second = await stage(cache, source)
    assert fetched == [source / "head"]
    assert os.stat(first.path / "weights").st_ino == os.stat(second.path / "weights").st_ino
    assert len(stored(tmp_path)) == 3
    await cache.remove(first.digest)
    await cache.drop([file.sha256 for file in first.files if file not in second.files])
    assert version_digest(second.path) == second.digest
    assert len(stored(tmp_path)) == 2


async def test_a_cached_file_that_was_cut_is_not_served(cache: DiskCache, source: Path) -> None:
    """Invariant 10, case B18: files that changed since they were verified are dropped and can be staged again."""
    await cache.start()
    staged = await stage(cache, source)
    (staged.path / "weights").write_bytes(b"")
    assert await cache.find(staged.digest) is None
    again = await stage(cache, source)
    assert version_digest(again.path) == staged.digest


async def test_leftovers_of_a_killed_process_go_at_start(cache: DiskCache, source: Path, tmp_path: Path) -> None:
    """What is half-made and cannot be gone on with has no final name and is thrown away; whole versions stay."""
    await cache.start()
    staged = await stage(cache, source)
    folder = tmp_path / "cache"
    for leftover in ("incoming/abc.version", "outgoing/def"):
        (folder / leftover / "content").mkdir(parents=True)
    (folder / "incoming" / "0.part").write_bytes(b"1")
    (folder / "files" / "aa").mkdir(exist_ok=True)
    (folder / "files" / "aa" / ("a" * 64)).write_bytes(b"of no version")
    cache.close()
    found = await cache.start()
    assert [version.digest for version in found.versions] == [staged.digest]
    assert found.interrupted == []
    assert list((folder / "incoming").iterdir()) == []
    assert list((folder / "outgoing").iterdir()) == []
    assert stored(tmp_path) == {staged.files[0].sha256}


async def test_a_killed_copy_is_gone_on_with(
    cache: DiskCache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal says two chunks are safe: the next process reads only those after them, and verifies all."""
    content = os.urandom(3 * CHUNK_BYTES + 5)
    (source / "weights").write_bytes(content)
    key = files_of(source)[0].sha256
    incoming = tmp_path / "cache" / "incoming"
    incoming.mkdir(parents=True)
    (incoming / f"{key}.part").write_bytes(content[: 2 * CHUNK_BYTES] + b"torn")
    (incoming / f"{key}.journal").write_text(str(2 * CHUNK_BYTES))
    found = await cache.start()
    assert [(part.key, part.size) for part in found.interrupted] == [(key, 2 * CHUNK_BYTES + 4)]
    offsets = seen_offsets(monkeypatch)
    staged = await stage(cache, source)
    assert sorted(offsets) == [2 * CHUNK_BYTES, 3 * CHUNK_BYTES]
    assert (staged.path / "weights").read_bytes() == content
    assert list(incoming.iterdir()) == []


async def test_a_resumed_copy_that_turns_out_bad_begins_anew(
    cache: DiskCache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 10: the hash of the whole decides; what a killed process left is not believed."""
    content = os.urandom(CHUNK_BYTES + 5)
    (source / "weights").write_bytes(content)
    key = files_of(source)[0].sha256
    incoming = tmp_path / "cache" / "incoming"
    incoming.mkdir(parents=True)
    (incoming / f"{key}.part").write_bytes(bytes(CHUNK_BYTES))
    (incoming / f"{key}.journal").write_text(str(CHUNK_BYTES))
    await cache.start()
    offsets = seen_offsets(monkeypatch)
    staged = await stage(cache, source)
    assert sorted(offsets) == [0, CHUNK_BYTES, CHUNK_BYTES]
    assert (staged.path / "weights").read_bytes() == content


async def test_the_journal_is_written_on_the_way(
    cache: DiskCache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an entry each chunk, a process killed in the fourth finds three: here the reader looks at the third read."""
    monkeypatch.setattr(file_copy, "JOURNAL_BYTES", CHUNK_BYTES)
    (source / "weights").write_bytes(os.urandom(6 * CHUNK_BYTES))
    key = files_of(source)[0].sha256
    seen: list[str] = []
    read = FileReader.read_into

    def looking(self: FileReader, view: memoryview, offset: int) -> int:
        journal = tmp_path / "cache" / "incoming" / f"{key}.journal"
        seen.append(journal.read_text() if journal.exists() else "")
        return read(self, view, offset)

    monkeypatch.setattr(FileReader, "read_into", looking)
    await cache.start()
    await stage(cache, source)
    assert seen[0] == ""
    assert int(seen[-1]) >= 2 * CHUNK_BYTES


async def test_a_failed_copy_leaves_no_half_file(cache: DiskCache, source: Path, tmp_path: Path) -> None:
    """Case B18: a file shorter than it was listed; the first cause is told, and nothing is in `incoming`."""
    await cache.start()
    (source / "weights").write_bytes(bytes(2 * CHUNK_BYTES))
    digest, files = version_digest(source), files_of(source)
    os.truncate(source / "weights", CHUNK_BYTES)
    with Traffic().lane(Priority.DEMAND) as lane, pytest.raises(InvalidInput, match="fewer"):
        await cache.stage(StageRequest(str(source), digest, files, 2 * CHUNK_BYTES), lane, lambda _: None)
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []


async def test_a_copy_that_nobody_waits_for_stops(cache: DiskCache, source: Path, tmp_path: Path) -> None:
    """Cancelled between two chunks: it ends, and leaves nothing; a lane that was left tells its threads."""
    await cache.start()
    (source / "weights").write_bytes(bytes(4 * CHUNK_BYTES))
    traffic = Traffic()
    request = StageRequest(str(source), version_digest(source), files_of(source), 4 * CHUNK_BYTES)
    with traffic.lane(Priority.DEMAND), traffic.lane(Priority.PREWARM) as lane:  # a demand holds it up
        copying = asyncio.create_task(cache.stage(request, lane, lambda _: None))
        await asyncio.sleep(0.05)
        assert not copying.done()
        copying.cancel()
        lane.leave()
        with pytest.raises(asyncio.CancelledError):
            await copying
    assert list((tmp_path / "cache" / "incoming").iterdir()) == []
    with pytest.raises(Unavailable):
        lane.wait_in_thread()


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "a/../../b", ""])
async def test_a_source_cannot_name_files_outside(cache: DiskCache, tmp_path: Path, name: str) -> None:
    """What a store lists is not trusted with names either."""

    class Evil:
        def files(self, source: str) -> list[ContentFile]:
            return [ContentFile(name=name, size=1, sha256="")]

        def open(self, source: str, file: ContentFile) -> FileReader:
            return FileReader(good, 1)

    good = tmp_path / "good"
    good.write_bytes(b"1")
    with closing(DiskCache(tmp_path / "cache", SystemClock(), Evil())) as evil:
        await evil.start()
        digest = evil_digest(name)
        with Traffic().lane(Priority.DEMAND) as lane, pytest.raises(InvalidInput):
            await evil.stage(StageRequest("s3://bucket", digest, (), 1), lane, lambda _: None)


async def test_two_processes_cannot_share_the_folder(cache: DiskCache, tmp_path: Path) -> None:
    """The second one is told so instead of cleaning up under the first."""
    await cache.start()
    with pytest.raises(Unavailable):
        await DiskCache(tmp_path / "cache", SystemClock()).start()


@pytest.mark.parametrize("digest", ["sha256:../../etc", "md5:" + "0" * 64, "sha256:" + "A" * 64])
async def test_what_is_no_digest_never_becomes_a_path(cache: DiskCache, digest: str) -> None:
    """A digest from outside cannot name another folder."""
    await cache.start()
    with pytest.raises(InvalidInput):
        await cache.find(Digest(digest))


async def test_an_address_needs_a_source_that_takes_it(cache: DiskCache) -> None:
    """Without one the answer says so; a missing folder is not found."""
    await cache.start()
    with pytest.raises(InvalidInput):
        await cache.look(StageRequest("s3://bucket/model", Digest("sha256:" + "0" * 64)))
    with pytest.raises(NotFound):
        await cache.look(StageRequest("/nowhere", Digest("sha256:" + "0" * 64)))


def seen_offsets(monkeypatch: pytest.MonkeyPatch) -> Sequence[int]:
    """Offsets that are read from the source from now on."""
    offsets: list[int] = []
    read = FileReader.read_into

    def counted(self: FileReader, view: memoryview, offset: int) -> int:
        offsets.append(offset)
        return read(self, view, offset)

    monkeypatch.setattr(FileReader, "read_into", counted)
    return offsets


def opened_paths(monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    """Files of the source that are opened from now on."""
    paths: list[Path] = []
    opening = FileReader.__init__

    def counted(self: FileReader, path: Path, size: int) -> None:
        paths.append(path)
        opening(self, path, size)

    monkeypatch.setattr(FileReader, "__init__", counted)
    return paths


def evil_digest(name: str) -> Digest:
    """The digest of a version of one file `1` under this name."""
    from hashlib import sha256

    from roundhouse.catalogue.digests import FileEntry, digest_of_entries

    return digest_of_entries([FileEntry(name, 1, sha256(b"1").digest())])


@pytest.fixture
async def one_thread() -> AsyncIterator[None]:
    """What the event loop lends threads from has one, as a small machine soon has under load."""
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    yield
    pool.shutdown(wait=False)


@pytest.mark.usefixtures("one_thread")
async def test_copies_that_wait_for_their_turn_keep_no_thread_from_the_one_they_wait_for(
    cache: DiskCache, source: Path, tmp_path: Path
) -> None:
    """Six new versions come in the background when a request needs a cold model: they pause, and it is staged."""
    await cache.start()
    traffic = Traffic()
    with traffic.lane(Priority.DEMAND) as demand:
        background = []
        for number in range(6):
            folder = tmp_path / f"new{number}"
            folder.mkdir()
            (folder / "weights").write_bytes(bytes([number]) * 100)
            background.append(asyncio.create_task(stage_on(traffic, cache, folder)))
        await asyncio.sleep(0)
        request = StageRequest(str(source), version_digest(source), files_of(source), 100)
        async with asyncio.timeout(30):
            await cache.stage(request, demand, lambda done: None)
            assert await cache.find(request.digest) is not None
        assert not any(each.done() for each in background)
    async with asyncio.timeout(30):
        await asyncio.gather(*background)


async def stage_on(traffic: Traffic, cache: DiskCache, folder: Path) -> CachedVersion:
    """Stage a folder in the background."""
    request = StageRequest(str(folder), version_digest(folder), files_of(folder), 100)
    with traffic.lane(Priority.PREWARM) as lane:
        return await cache.stage(request, lane, lambda done: None)


@pytest.mark.usefixtures("one_thread")
async def test_a_source_that_hangs_keeps_no_thread_from_others(
    cache: DiskCache, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that never answers: whoever gives such a copy up can use the cache, and the same version is not begun
    again before the first copy has let go, so that not each try leaves more threads behind."""
    await cache.start()
    answers, asked = threading.Event(), threading.Event()
    opening = FileReader.__init__

    def hang(reader: FileReader, path: Path, size: int) -> None:
        asked.set()
        answers.wait(60)
        opening(reader, path, size)

    monkeypatch.setattr(disk_cache, "STOP_S", 0.01)
    request = StageRequest(str(source), version_digest(source), files_of(source), 100)
    waiting = ThreadPoolExecutor(1)
    with waiting, Traffic().lane(Priority.DEMAND) as lane, monkeypatch.context() as hanging:
        hanging.setattr(FileReader, "__init__", hang)
        staging = asyncio.create_task(cache.stage(request, lane, lambda done: None))
        await asyncio.wrap_future(waiting.submit(asked.wait, 30))
        staging.cancel()
        async with asyncio.timeout(30):
            await asyncio.gather(staging, return_exceptions=True)
            assert await cache.find(request.digest) is None
            with pytest.raises(Unavailable, match="hangs"):
                await cache.stage(request, lane, lambda done: None)
        answers.set()
    async with asyncio.timeout(30):
        while True:
            try:
                await stage(cache, source)
                break
            except Unavailable:
                await asyncio.sleep(0.01)
    assert await cache.find(request.digest) is not None


async def test_a_source_that_is_no_file_is_said_so_and_not_waited_for(cache: DiskCache, tmp_path: Path) -> None:
    """To open a pipe waits until somebody writes into it: for ever."""
    await cache.start()
    folder = tmp_path / "pipes"
    folder.mkdir()
    os.mkfifo(folder / "weights")
    listed = (ContentFile(name="weights", size=5, sha256="0" * 64),)
    digest = digest_of_entries([FileEntry("weights", 5, bytes(32))])
    with Traffic().lane(Priority.DEMAND) as lane:
        for files in (listed, ()):
            with pytest.raises(InvalidInput, match="not a regular file"):
                async with asyncio.timeout(30):
                    await cache.stage(StageRequest(str(folder), digest, files, 100), lane, lambda done: None)

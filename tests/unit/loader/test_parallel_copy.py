"""Several files copied at once: what one thread alone could not get wrong."""

import threading
from pathlib import Path

import pytest

from roundhouse.catalogue.digests import version_digest
from roundhouse.errors import InvalidInput, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapters import parallel_copy
from services.loader.adapters.parallel_copy import CHUNK_BYTES, FILES_AT_ONCE, ParallelCopy

SIZES = [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 7, 8, 9, 10, 11]  # more files than threads


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Files around the size of a chunk, each with its own content."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number, size in enumerate(SIZES):
        (folder / f"shard-{number:02}").write_bytes(bytes([number]) * size)
    assert len(SIZES) > FILES_AT_ONCE
    return folder


def copy(
    source: Path, target: Path, digest: Digest, size_max: int, stopped: threading.Event | None = None
) -> list[int]:
    """Run one copy; the progress it reported."""
    reports: list[int] = []
    ParallelCopy(source, size_max, reports.append, stopped or threading.Event()).run(target, digest)
    return reports


def test_every_file_arrives_whole_through_buffers_used_again(source: Path, tmp_path: Path) -> None:
    """Invariant 10: nothing of one file is left in the next one's buffer."""
    digest = version_digest(source)
    copy(source, tmp_path / "target", digest, sum(SIZES))
    assert version_digest(tmp_path / "target") == digest


def test_progress_rises_over_all_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts are of the whole version, not of one file, and never go back."""
    monkeypatch.setattr(parallel_copy, "REPORT_BYTES", 1)
    reports = copy(source, tmp_path / "target", version_digest(source), sum(SIZES))
    assert reports == sorted(set(reports))
    assert reports[-1] == sum(SIZES)


def test_the_first_cause_is_told(source: Path, tmp_path: Path) -> None:
    """The files that stop because another one failed do not hide why."""
    with pytest.raises(InvalidInput, match="grew"):
        copy(source, tmp_path / "target", version_digest(source), CHUNK_BYTES)


def test_a_stopped_copy_ends_without_a_manifest(source: Path, tmp_path: Path) -> None:
    """Whoever gave up the wait does not get a half-copied version."""
    stopped = threading.Event()
    stopped.set()
    with pytest.raises(Unavailable):
        copy(source, tmp_path / "target", version_digest(source), sum(SIZES), stopped)

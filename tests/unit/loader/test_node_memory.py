"""What a loader remembers for the next one, in its file."""

from pathlib import Path

from services.loader.adapters.node_memory import NodeFile
from services.loader.ports import Measured, Remembered


async def test_what_was_kept_is_recalled(tmp_path: Path) -> None:
    """All of it; nothing where there is no file or not one of ours, and an older file is read."""
    file = NodeFile(tmp_path)
    assert await file.recall() == Remembered()
    known = Remembered("new fan", ("m--1",), (Measured("m", "sha256:1", devices=2, bytes=99),))
    await file.keep(known)
    assert await file.recall() == known
    (tmp_path / "node.json").write_text('{"maintenance": "new fan", "dead": []}')
    assert await file.recall() == Remembered("new fan")
    (tmp_path / "node.json").write_text("half a fi")
    assert await file.recall() == Remembered()

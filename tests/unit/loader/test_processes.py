"""Ending the processes of models, where the operating system does not play along."""

import os
from pathlib import Path

import pytest

from roundhouse.errors import Unavailable
from services.loader.adapters import model_processes
from services.loader.adapters.model_processes import StubProcesses


async def test_what_may_not_or_cannot_be_ended_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user's process, and one that no signal reaches; one that has ended already is no error."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError if pid == 1 else ProcessLookupError

    processes = StubProcesses(8001, tmp_path)
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(Unavailable, match="run it as Triton's user"):
        await processes.end([1])
    await processes.end([2])
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "stat").write_text("2 (stub) D 1 1 1")
    monkeypatch.setattr(model_processes, "END_LOOKS", 2)
    with pytest.raises(Unavailable, match="still there"):
        await processes.end([2])

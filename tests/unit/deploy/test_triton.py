"""Assembling Triton from the wheel: links, and a clear word when something is missing."""

import sys
from pathlib import Path

import pytest

from deploy.local import triton
from deploy.local.server import PartFailed


def fake_wheel(root: Path, version: str) -> Path:
    """A wheel with one stub."""
    (root / "backends" / "python").mkdir(parents=True)
    (root / "backends" / "python" / "libtriton_python.so").touch()
    (root / "python_backend_stubs" / version).mkdir(parents=True)
    (root / "python_backend_stubs" / version / "triton_python_backend_stub").touch()
    return root


def test_backend_and_stub_of_this_python_are_linked_together(tmp_path: Path) -> None:
    """Triton wants one folder; a second start changes nothing; a moved wheel is linked anew."""
    for wheel in (
        fake_wheel(tmp_path / "old", triton.python_version()),
        fake_wheel(tmp_path / "new", triton.python_version()),
    ):
        for _ in range(2):
            folder = triton.assemble_backends(wheel, tmp_path / "backends")
        links = {path.name: path.resolve().is_relative_to(wheel) for path in (folder / "python").iterdir()}
        assert links == {"libtriton_python.so": True, "triton_python_backend_stub": True}


def test_a_python_without_stub_is_told_which_ones_there_are(tmp_path: Path) -> None:
    """The message names this version and those of the wheel."""
    wheel = fake_wheel(tmp_path, "2.7")
    with pytest.raises(PartFailed, match=rf"no stub for Python {triton.python_version()} \(it has 2\.7\)"):
        triton.assemble_backends(wheel, tmp_path / "backends")


def test_a_missing_libpython_is_told_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the first load would hang; so it is looked for before Triton starts."""
    monkeypatch.setattr(triton, "_libpython", lambda: "libpython3.99.so.1.0")
    with pytest.raises(PartFailed, match=rf"libpython3\.99.*apt-get install libpython3\.{sys.version_info.minor}"):
        triton.require_libpython({})

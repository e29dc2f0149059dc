"""grpcio is installed in more places than the lock: all of them have the limit of pyproject.toml (decision 0002)."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
NAMED = re.compile(r'"(grpcio[<>=][^"]*)"')


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile.gpu"])
def test_every_place_has_the_limit_of_the_package(file: str) -> None:
    """Without it a peer's unknown HTTP/2 error code ends the process: tests/integration/test_grpc_channels.py."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (wanted,) = (each for each in dependencies if re.match(r"grpcio[<>=]", each))
    assert set(NAMED.findall((ROOT / file).read_text(encoding="utf-8"))) == {wanted}

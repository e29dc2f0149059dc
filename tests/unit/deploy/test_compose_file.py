"""What the containers of a node have to share, read from the compose file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

COMPOSE = Path(__file__).parents[3] / "deploy" / "docker-compose.yml"


def service(name: str) -> dict[str, Any]:
    """One service, with what it merges in."""
    found = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"][name]
    assert isinstance(found, dict)
    return found


def volume_at(name: str, place: str) -> str:
    """The volume that a service has at a path."""
    return next(str(each).split(":")[0] for each in service(name)["volumes"] if each.split(":")[1] == place)


@pytest.mark.parametrize("triton", ["triton-1", "triton-gpu"])
def test_a_loader_writes_into_the_repository_that_its_triton_reads(triton: str) -> None:
    """It makes a folder for each model there: on a volume of both, and nothing lies over it. They share the arena too,
    with adapters and the links by which vLLM finds them."""
    repository = service("loader-1")["environment"]["ROUNDHOUSE_TRITON_REPOSITORY"]
    command = " ".join(service(triton)["command"])
    assert repository == "/cache/triton/models"
    assert f"--model-repository={repository}" in command or f"--folder {Path(repository).parent}" in command
    assert not service(triton).get("tmpfs")
    for place in ("/cache", "/arena"):
        assert volume_at(triton, place) == volume_at("loader-1", place)

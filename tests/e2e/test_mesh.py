"""The whole mesh answers, bills and recovers; each model of the catalogue does what it is for."""

import time
from typing import Any

import httpx
import pytest
from openai import APIError, OpenAI

from tests.e2e.catalogue import ANSWER
from tests.e2e.mesh import Mesh

pytestmark = pytest.mark.timeout(240)


def client_of(mesh: Mesh, tenant: str = "acme") -> OpenAI:
    """The official client with a tenant's key."""
    return OpenAI(base_url=f"{mesh.http_url}/v1", api_key=mesh.keys[tenant], max_retries=0, timeout=60)


def ask(mesh: Mesh, model: str, tenant: str = "acme", **options: Any) -> str:
    """One whole chat answer: the likeliest one, as a drawn one may end at once."""
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client_of(mesh, tenant).chat.completions.create(model=model, messages=messages, temperature=0, **options)
    return answer.choices[0].message.content or ""


def rows(mesh: Mesh, **parameters: str) -> list[dict[str, Any]]:
    """Rows of the usage report."""
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    answer = httpx.get(f"{mesh.admin_url}/admin/v1/usage", params=parameters, headers=headers)
    found: list[dict[str, Any]] = answer.json()["rows"]
    return found


def test_a_streamed_answer_is_the_whole_answer_character_by_character(mesh: Mesh) -> None:
    """Case B31: characters split over tokens arrive whole; joined deltas = the answer without streaming."""
    messages: Any = [{"role": "user", "content": "hello"}]
    stream = client_of(mesh).chat.completions.create(model="words", messages=messages, stream=True)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert joined == ask(mesh, "words") == ANSWER


def test_more_models_than_fit_are_all_served(mesh: Mesh) -> None:
    """Ten of 20 MiB fit into the mesh; eleven are called one after the other, so one is unloaded for another."""
    names = [f"tiny-{number}" for number in range(1, 7)] + ["acme-only", "words", "story", "slow-load", "tiny-1-lora"]
    for name in names * 2:
        assert ask(mesh, name, max_tokens=4) != "", name


def test_what_is_not_visible_does_not_exist(mesh: Mesh) -> None:
    """A model of acme is 404 for globex; so is acme's adapter."""
    for name in ("acme-only", "tiny-1-lora"):
        with pytest.raises(APIError) as refused:
            ask(mesh, name, tenant="globex", max_tokens=1)
        assert refused.value.code == "model_not_found"


def test_a_load_that_fails_says_why_and_spoils_nothing(mesh: Mesh) -> None:
    """Case B18: the broken model is refused; another model answers meanwhile; the nodes stay ready."""
    with pytest.raises(APIError):
        ask(mesh, "broken", max_tokens=1)
    assert ask(mesh, "tiny-2", max_tokens=4) != ""
    assert [mesh.why_not_ready(f"loader-{number}") for number in (1, 2)] == [None, None]


@pytest.mark.parametrize(
    "part", ["scheduler", "metering", "loader-1", "kvstore-1", "valkey", "nats", "gateway", "triton-1"]
)
def test_a_part_that_crashes_comes_back_and_the_mesh_serves_again(mesh: Mesh, part: str) -> None:
    """SIGKILL of any part: the supervisor starts it again, every part gets ready, and requests are answered."""
    before = mesh.restarts[part]
    mesh.crash(part)
    deadline = time.monotonic() + 20
    while mesh.restarts[part] == before and time.monotonic() < deadline:
        time.sleep(0.05)
    mesh.wait_ready()
    answered = ""
    deadline = time.monotonic() + 30
    while not answered and time.monotonic() < deadline:
        try:
            answered = ask(mesh, "tiny-3", max_tokens=4)
        except APIError:
            time.sleep(0.5)
    assert answered, f"no answer within 30 s after a crash of {part}"


def test_tokens_on_the_bill_are_the_tokens_that_were_answered(mesh: Mesh) -> None:
    """Invariant 13 over HTTP: three answers of 6 tokens are 18 output tokens more on globex's bill."""
    before = sum(row["output_tokens"] for row in rows(mesh, tenant="globex", group_by="tenant"))
    for _ in range(3):
        ask(mesh, "story", tenant="globex", max_tokens=6)
    deadline = time.monotonic() + 10
    after = before
    while after < before + 18 and time.monotonic() < deadline:
        time.sleep(0.1)
        after = sum(row["output_tokens"] for row in rows(mesh, tenant="globex", group_by="tenant"))
    assert after == before + 18


def test_an_operator_sees_why_a_model_is_warm(mesh: Mesh) -> None:
    """The forecast of a model that was asked for names its arrivals; a name that is no model is 404."""
    ask(mesh, "tiny-1", max_tokens=1)
    headers = {"Authorization": f"Bearer {mesh.admin_key}"}
    deadline, found = time.monotonic() + 30, dict[str, Any]()
    while not found.get("wanted_before") and time.monotonic() < deadline:  # the history is told once a second
        time.sleep(0.1)
        found = httpx.get(f"{mesh.admin_url}/admin/v1/models/tiny-1/forecast", headers=headers).json()
    assert found["arrivals"] >= 1
    assert found["text"]
    assert httpx.get(f"{mesh.admin_url}/admin/v1/models/none/forecast", headers=headers).status_code == 404

"""`roundhouse keys`, `apply`, `get` and `models` as programs, against the admin port of a running gateway."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.gateway.domain.keys import key_hash
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.unit.catalogue.files import GOOD, write_models
from tests.unit.catalogue.test_assembly import assembled
from tests.unit.gateway.gateway_world import catalogue

ROOT = "rh-admin-" + "b" * 43


@dataclass
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass
class Desk:
    """A gateway, and an operator in front of it."""

    gateway: RunningGateway

    async def run(self, *words: str, key: str = ROOT, stdin: str = "") -> Ran:
        """One command, in a process of its own, with its address and key in the environment."""
        process = await self._start(words, key, asyncio.subprocess.PIPE)
        out, err = await process.communicate(stdin.encode())
        return Ran(process.returncode or 0, out.decode(), err.decode())

    async def run_on_a_terminal(self, *words: str, answer: str) -> Ran:
        """The same, and somebody types `answer`."""
        keyboard, terminal = os.openpty()
        os.write(keyboard, answer.encode())
        process = await self._start(words, ROOT, terminal)
        os.close(terminal)
        out, err = await process.communicate()
        os.close(keyboard)
        return Ran(process.returncode or 0, out.decode(), err.decode())

    async def _start(self, words: Sequence[str], key: str, stdin: int) -> asyncio.subprocess.Process:
        environment = {
            **os.environ,
            "ROUNDHOUSE_ADMIN_URL": f"http://127.0.0.1:{self.gateway.addresses.admin}",
            "ROUNDHOUSE_ADMIN_KEY": key,
        }
        pipe = asyncio.subprocess.PIPE
        program = [sys.executable, "-m", "roundhouse.cli.app", *words]
        return await asyncio.create_subprocess_exec(*program, env=environment, stdin=stdin, stdout=pipe, stderr=pipe)


@pytest.fixture
async def desk(nats_url: str, redis_url: str) -> AsyncIterator[Desk]:
    """Tenants t1 and t2, and the models of the world."""
    async with running_gateway(nats_url, redis_url, catalogue(), admin_key_hash=key_hash(ROOT)) as gateway:
        yield Desk(gateway)


async def models_status(desk: Desk, key: str) -> int:
    """What a tenant's key opens."""
    async with desk.gateway.client(authorization=f"Bearer {key}") as client:
        return (await client.get("/v1/models")).status_code


async def test_a_key_is_made_rotated_and_revoked(desk: Desk) -> None:
    """The key alone on stdout; its successor works beside it; a revoked one ends; lists show no key."""
    made = await desk.run("keys", "create", "t1", "--expires", "90d", "--label", "shop", "--requests-per-minute", "60")
    assert (made.code, re.fullmatch(r"rh-[\w-]{43}\n", made.out) is not None) == (0, True)
    key_id = re.search(r"key-[0-9a-f]+", made.err)
    assert key_id is not None
    assert await models_status(desk, made.out.strip()) == 200
    rotated = await desk.run("keys", "rotate", key_id[0], "--overlap", "1h", "-o", "json")
    successor = json.loads(rotated.out)
    assert (successor["replaces"], successor["limits"]["requests_per_minute"]) == (key_id[0], 60)
    assert [await models_status(desk, key) for key in (made.out.strip(), successor["key"])] == [200, 200]
    listed = await desk.run("keys", "list", "t1", "-o", "json")
    assert {one["key_id"] for one in json.loads(listed.out)} >= {key_id[0], successor["key_id"]}
    assert made.out.strip() not in listed.out
    assert (await desk.run("keys", "revoke", successor["key_id"])).code == 0
    await asyncio.sleep(1.1)  # the bound of case B06 for what is not admitted
    assert await models_status(desk, successor["key"]) == 401


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("keys", "create", "nobody"), 1, "there is no tenant `nobody`"),
        (("keys", "create", "t1", "--expires", "soon"), 2, "--expires"),
        (("keys", "rotate", "key-none"), 1, "no such key"),
        (("keys", "rotate", "rh-secret"), 1, "not the key itself"),
        (("keys", "revoke", "rh-secret"), 1, "not the key itself"),
        (("models", "load", "absent"), 1, "there is no model `absent`"),
        (("get", "tenants", "absent"), 1, "there is no tenant `absent`"),
        (("apply", "-f", "/nowhere.yaml"), 1, "cannot be read"),
    ],
)
async def test_refusals_are_told_on_stderr_with_their_code(
    desk: Desk, words: tuple[str, ...], code: int, says: str
) -> None:
    """0 done, 1 refused, 2 wrong usage; nothing on stdout, no trace of Python."""
    ran = await desk.run(*words)
    assert (ran.code, ran.out) == (code, "")
    assert says in ran.err
    assert "Traceback" not in ran.err


async def test_a_wrong_key_is_refused_and_not_repeated(desk: Desk) -> None:
    """Invariant 16: what was tried is not echoed."""
    wrong = "rh-" + "w" * 43
    ran = await desk.run("keys", "list", key=wrong)
    assert (ran.code, "ROUNDHOUSE_ADMIN_KEY" in ran.err) == (1, True), "it says what to do"
    assert wrong not in ran.out + ran.err


async def test_a_declaration_is_checked_applied_and_shown(desk: Desk, tmp_path: Path) -> None:
    """A dry run changes nothing; problems have their places; the same again is unchanged."""
    file = write_models(tmp_path) / "catalogue.yaml"
    file.write_text(GOOD)
    dry = await desk.run("apply", "-f", str(file), "--dry-run")
    assert (dry.code, "would become generation 1" in dry.out) == (0, True)
    wrong = await desk.run("apply", "-f", "-", "--base-dir", str(tmp_path), stdin=GOOD.replace("weight", "wieght"))
    assert wrong.code == 1
    assert re.search(r"-:4:5: unknown key `wieght`", wrong.err)
    done = await desk.run("apply", "-f", str(file))
    assert (done.code, "generation 1" in done.out) == (0, True)
    again = await desk.run("apply", "-f", str(file))
    assert "unchanged" in again.out


async def test_what_is_shown_can_be_edited_and_applied(desk: Desk, tmp_path: Path) -> None:
    """All of it is the same generation again, from wherever; an edit changes that one thing; one kind is a list."""
    file = write_models(tmp_path) / "catalogue.yaml"
    file.write_text(GOOD)
    assert (await desk.run("apply", "-f", str(file))).code == 0
    desk.gateway.catalogue.current = assembled(GOOD, tmp_path)
    shown = await desk.run("get", "-o", "yaml")
    assert "unchanged" in (await desk.run("apply", "-f", "-", stdin=shown.out)).out, shown.err
    edited = await desk.run("apply", "-f", "-", stdin=shown.out.replace("slots: 2", "slots: 3"))
    assert "changed model    chat (slots)" in edited.out
    tenants = json.loads((await desk.run("get", "tenants", "acme", "-o", "json")).out)
    assert [(tenant["name"], tenant["class"]) for tenant in tenants] == [("acme", "interactive")]
    assert {"tenants", "acme", "models", "chat", "sharing-groups"} <= set((await desk.run("get")).out.split())


async def test_on_a_terminal_it_asks_before_it_removes(desk: Desk, tmp_path: Path) -> None:
    """A file without a tenant that there is would take it away: told, and nothing is done without a yes."""
    file = write_models(tmp_path) / "catalogue.yaml"
    file.write_text(GOOD)
    assert (await desk.run_on_a_terminal("apply", "-f", str(file), answer="")).code == 0, "it only adds: no question"
    file.write_text(GOOD.replace("  - name: globex\n", ""))
    refused = await desk.run_on_a_terminal("apply", "-f", str(file), answer="n\n")
    assert (refused.code, "Remove 1 that the file does not have?" in refused.err) == (1, True)
    assert "would become generation 2" in refused.out
    done = await desk.run_on_a_terminal("apply", "-f", str(file), answer="y\n")
    assert (done.code, "\ngeneration 2: 0 added, 0 changed, 1 removed" in done.out) == (0, True)


async def test_what_there_is_is_shown(desk: Desk) -> None:
    """Tables for people, JSON and YAML for programs."""
    tenants = await desk.run("get", "tenants")
    assert {"t1", "t2"} <= set(tenants.out.split())
    shown = json.loads((await desk.run("get", "models", "m", "-o", "json")).out)
    assert [model["name"] for model in shown] == ["m"]
    assert "name: scorer" in (await desk.run("get", "models", "-o", "yaml")).out
    assert (await desk.run("get", "nodes")).code == 0
    listed = await desk.run("models", "list")
    assert "registered" in listed.out
    refused = await desk.run("models", "load", "m")
    assert (refused.code, "no node" in refused.err) == (1, True)


async def test_an_address_is_declared_and_a_model_pinned(desk: Desk, tmp_path: Path) -> None:
    """`files` prints what a declaration of an address needs; pins are taken, those of the declaration stay."""
    root = write_models(tmp_path)
    file = root / "catalogue.yaml"
    listed = await desk.run("files", str(root / "adapters" / "chat-acme"))
    indented = "".join(f"      {line}\n" for line in listed.out.splitlines())
    file.write_text(f"{GOOD}  - name: far\n    base: chat\n    source:\n      path: https://host/far\n{indented}")
    applied = await desk.run("apply", "-f", str(file))
    assert (applied.code, "far" in applied.out) == (0, True), applied.err
    pinned = await desk.run("models", "pin", "tagger", "--replicas", "2")
    assert (pinned.code, "2 replicas" in pinned.out) == (0, True)
    refused = await desk.run("models", "unpin", "chat")
    assert (refused.code, "change its `residency`" in refused.err) == (1, True)
    assert (await desk.run("adapters", "list")).code == 0

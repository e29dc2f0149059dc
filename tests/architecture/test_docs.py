"""What the documents name is there: pages, commands with their options, settings."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from roundhouse.cli.app import app
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KvStoreSettings
from services.loader.settings import LoaderSettings
from services.metering.settings import MeteringSettings
from services.scheduler.settings import SchedulerSettings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GUIDES = [page for page in PAGES if "decisions" not in page.parts and page.name != "CHANGELOG.md"]
SERVICES = (GatewaySettings, KvStoreSettings, LoaderSettings, MeteringSettings, SchedulerSettings)
SETTING = re.compile(r"\bROUNDHOUSE_([A-Z_0-9]*[A-Z0-9])\b")
END_OF_COMMAND = {"|", "·", ">", "&&", "||", ";", "--"}


def name_of(page: Path) -> str:
    """Below the root."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page, without its anchor."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [each for each in targets if "://" not in each and not (page.parent / each).exists()] == []


def test_the_layout_names_every_shared_room() -> None:
    """Each module and folder of `roundhouse/`, in the layout of ARCHITECTURE.md."""
    layout = set(re.findall(r"\w+", (ROOT / "ARCHITECTURE.md").read_text().partition("## Where things are")[2]))
    rooms = {path.stem for path in (ROOT / "roundhouse").iterdir() if not path.name.startswith("__")}
    assert rooms - layout == set()


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_commands_are_there(page: Path) -> None:
    """Every `roundhouse …` in code: its subcommands by name, its options."""
    assert [wrong for command in commands_in(page.read_text()) for wrong in unknown_words(command)] == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("usage --by tenant,day --plot amount | less", []),
        ("webhooks list | dead ID", []),
        ("models lost", ["models lost"]),
        ("models load NAME [--nodes N]", ["models load NAME --nodes"]),
    ],
)
def test_unknown_words_are_found(command: str, wrong: list[str]) -> None:
    """What the test above looks with: a test that cannot fail is a defect."""
    assert list(unknown_words(command)) == wrong


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_settings_are_there(page: Path) -> None:
    """Every ROUNDHOUSE_NAME: a setting of a service, or one that some program or test reads besides."""
    named = set(SETTING.findall(page.read_text()))
    assert named - {name.upper() for kind in SERVICES for name in kind.model_fields} - read_elsewhere() == set()


@cache
def read_elsewhere() -> frozenset[str]:
    """Settings by name in any program, or in the compose file."""
    files = [file for folder in ("roundhouse", "deploy", "engines", "tests") for file in (ROOT / folder).rglob("*.py")]
    files += (ROOT / "deploy").rglob("*.y*ml")
    return frozenset(name for file in files for name in SETTING.findall(file.read_text()))


def commands_in(text: str) -> Iterator[str]:
    """Commands in fenced, indented and inline code."""
    fenced = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^    +(\S.*)$", text, re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for line in (line for block in (*fenced, *indented, *inline) for line in block.splitlines()):
        yield from re.findall(r"(?:^|[\s/])roundhouse ((?:[a-z-]+|--help)\b[^#]*)", line)


def unknown_words(command: str) -> Iterator[str]:
    """Words of a command that the tree of commands does not know. What is optional or a choice loses its brackets."""
    words = re.sub(r"[\[\]()]", " ", command).split()
    here: Any = typer.main.get_command(app)
    context = here.make_context("roundhouse", [], resilient_parsing=True)
    is_value = False
    for number, word in enumerate(words):
        if word in END_OF_COMMAND:
            return
        if is_value:
            is_value = False
        elif word.startswith("-"):
            option = _option(here, context, word.partition("=")[0])
            is_value = option is not None and not option.is_flag and "=" not in word
            if option is None and not here.context_settings.get("ignore_unknown_options"):
                yield " ".join(words[: number + 1])
        elif hasattr(here, "list_commands"):
            if word not in here.list_commands(context):
                yield " ".join(words[: number + 1])
                return
            here = here.get_command(context, word)
            context = here.make_context(word, [], resilient_parsing=True)


def _option(command: Any, context: Any, flag: str) -> Any:
    return next((each for each in command.get_params(context) if flag in each.opts), None)

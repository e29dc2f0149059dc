"""What `python -m services.NAME --help` says of the settings."""

import sys

import pytest

from roundhouse.environment import ServiceSettings, settings_of_process
from services.gateway.settings import GatewaySettings
from services.kvstore.settings import KvStoreSettings
from services.loader.settings import LoaderSettings
from services.metering.settings import MeteringSettings
from services.scheduler.settings import SchedulerSettings

ALL = (GatewaySettings, KvStoreSettings, LoaderSettings, MeteringSettings, SchedulerSettings)


@pytest.mark.parametrize("kind", ALL)
def test_every_setting_says_what_it_is(kind: type[ServiceSettings]) -> None:
    """A name and a default do not tell an operator what happens."""
    assert [name for name, field in kind.model_fields.items() if not field.description] == []


def test_help_lists_the_settings_with_their_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that must be given are named so; nothing is read or started."""
    monkeypatch.setattr(sys, "argv", ["loader", "--help"])
    with pytest.raises(SystemExit) as exit_:
        settings_of_process(LoaderSettings, "loader", "Weights.")
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "python -m services.loader" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ROUNDHOUSE_")}
    assert lines["ROUNDHOUSE_NODE_ID"].endswith("(required)")
    assert lines["ROUNDHOUSE_LOG_LEVEL"].endswith("(default 'info')")

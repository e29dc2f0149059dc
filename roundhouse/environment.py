"""The only reader of environment variables.

Each service declares a subclass of `ServiceSettings`; every field is read from `ROUNDHOUSE_<FIELD>`. A missing or wrong
value ends the process with exit code 2 and one line a problem, before anything is started.
"""

import argparse
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

EXIT_BAD_SETTINGS = 2


class ServiceSettings(BaseSettings):
    """What every service needs to know."""

    model_config = SettingsConfigDict(env_prefix="ROUNDHOUSE_", extra="ignore", frozen=True)

    cluster: str = Field(default="roundhouse", description="name of the cluster: the `source` of usage events")
    instance_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12], description="unique name of this process")
    nats_url: str = Field(default="nats://127.0.0.1:4222", description="NATS server with JetStream")
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        pattern=r"^((rediss?|unix)|rediss?\+cluster)://",
        description="Valkey or Redis; a cluster: redis+cluster://host:port,host:port",
    )
    bind_host: str = Field(default="127.0.0.1", description="address that the servers of this process listen on")
    ops_port: int = Field(default=0, ge=0, le=65535, description="health, readiness and metrics; 0 picks a free port")
    log_level: str = Field(
        default="info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error"
    )
    drain_seconds: float = Field(default=20.0, ge=0, description="how long SIGTERM waits for running work")


Settings = TypeVar("Settings", bound=ServiceSettings)


def read_settings(kind: type[Settings]) -> Settings:
    """Read `kind` from the environment, or exit with code 2 and one line for each wrong value."""
    try:
        return kind()
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            name = "_".join(str(part) for part in problem["loc"])
            sys.stderr.write(f"ROUNDHOUSE_{name.upper()}: {problem['msg']}\n")
        sys.exit(EXIT_BAD_SETTINGS)


def settings_of_process(kind: type[Settings], service: str, description: str) -> Settings:
    """Read `kind` for `python -m services.<service>`, or print `--help` with every setting and exit with code 0."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}",
        description=description,
        epilog=_settings_told(kind),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    return read_settings(kind)


def _settings_told(kind: type[ServiceSettings]) -> str:
    fields = kind.model_fields
    width = max(map(len, fields))
    lines = ["environment variables:"]
    for name, field in fields.items():
        default = "generated" if field.default_factory else f"default {field.default!r}"
        default = "required" if field.is_required() else default
        lines.append(f"  ROUNDHOUSE_{name.upper():<{width}}  {field.description} ({default})")
    return "\n".join(lines)


def otlp_endpoint() -> str | None:
    """OTLP endpoint from OpenTelemetry's own variables; None turns export off."""
    return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")


def child_environment(additions: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: ours without `ROUNDHOUSE_*`, which the parent sets for each child anew."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ROUNDHOUSE_")}
    return {**inherited, **additions}


def worker_environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Our own environment with some `ROUNDHOUSE_` settings replaced, for a process that does the same work as we."""
    return {**os.environ, **{f"ROUNDHOUSE_{name}": value for name, value in settings.items()}}


def roundhouse_home() -> Path:
    """Where the embedded cluster keeps its state: `ROUNDHOUSE_HOME`, else `.roundhouse` in the current folder."""
    return Path(os.environ.get("ROUNDHOUSE_HOME") or ".roundhouse").absolute()


def admin_access() -> tuple[str | None, str | None]:
    """Where operators' commands find the admin API and which key they use; None where nothing is set."""
    return os.environ.get("ROUNDHOUSE_ADMIN_URL") or None, os.environ.get("ROUNDHOUSE_ADMIN_KEY") or None


def test_infrastructure() -> str:
    """How tests get NATS, Valkey and PostgreSQL: `programs` (the default) or `containers`."""
    return os.environ.get("ROUNDHOUSE_TEST_INFRA") or "programs"


def kill_tests_wanted() -> str:
    """How many parts a test of kills kills at how many steps: `sample` (the default) or `all`."""
    return os.environ.get("ROUNDHOUSE_TEST_KILLS") or "sample"


def redis_under_test() -> str:
    """What tests of services get for a store: one `server` (the default), or a `cluster`."""
    return os.environ.get("ROUNDHOUSE_TEST_REDIS") or "server"

"""Settings of services that somebody chose for an embedded cluster: `--set scheduler.burst_credit_requests=4`.

A name that the service does not have is refused here: a service ignores variables that it does not know, so that a
misspelt one would silently do nothing. Values are judged by the service itself when it starts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

SERVICES = {
    "gateway": "GatewaySettings",
    "kvstore": "KvStoreSettings",
    "loader": "LoaderSettings",
    "metering": "MeteringSettings",
    "scheduler": "SchedulerSettings",
}


@dataclass(frozen=True, slots=True)
class Override:
    """One setting of every process of one service. `name` in upper case, without `ROUNDHOUSE_`."""

    service: str
    name: str
    value: str


def parse_override(text: str) -> Override:
    """Read `SERVICE.NAME=VALUE`. Raises ValueError with what is wrong with it."""
    target, equals, value = text.partition("=")
    service, dot, name = target.partition(".")
    if not (equals and dot and name):
        raise ValueError(f"{text}: must be SERVICE.NAME=VALUE, such as scheduler.burst_credit_requests=4")
    if service not in SERVICES:
        raise ValueError(f"{text}: no such service; one of {', '.join(SERVICES)}")
    name = name.lower().removeprefix("roundhouse_")
    if name not in _names(service):
        raise ValueError(
            f"{text}: {service} has no setting {name}; `python -m services.{service} --help` lists what it has"
        )
    return Override(service, name.upper(), value)


def chosen_for(service: str, overrides: Iterable[Override]) -> Mapping[str, str]:
    """The settings of one service; of two for the same name the later one."""
    return {override.name: override.value for override in overrides if override.service == service}


def _names(service: str) -> frozenset[str]:
    settings = getattr(import_module(f"services.{service}.settings"), SERVICES[service])
    return frozenset(settings.model_fields)

"""What an autoscaler reads (KEDA or a person, through Prometheus): per model and per pool, every few seconds.

Replicas wanted and nodes wanted are wishes of the residency plan; nothing here scales anything. Labels are the pools
and models of the catalogue; a model that leaves it loses its series (invariant 17).
"""

from prometheus_client import Gauge

from roundhouse.telemetry import REGISTRY
from roundhouse.vocabulary import PoolName
from services.scheduler.domain.records import model_of
from services.scheduler.domain.warmth.autoscale import ModelSignal, PoolSignal

_MODEL = ["pool", "model"]


def _gauge(name: str, text: str, labels: list[str]) -> Gauge:
    return Gauge(f"roundhouse_{name}", text, labels, registry=REGISTRY)


_RATE = _gauge("model_request_rate", "Requests a second, averaged over minutes", _MODEL)
_WAIT = _gauge("model_queue_seconds", "Mean wait from submit to grant, averaged over minutes", _MODEL)
_PROMISE = _gauge("model_queue_promise_seconds", "What the catalogue promises for the first token", _MODEL)
_REPLICAS = _gauge("model_replicas", "Ready instances on healthy nodes", _MODEL)
_WANTED = _gauge("model_replicas_wanted", "Instances that the promise needs, or pins and minimums ask for", _MODEL)
_VALUE = _gauge("model_value_per_mib", "Seconds of waiting that a MiB of its memory saves each second", _MODEL)
_COLD = _gauge("model_cold_loads_per_hour", "Loads of the last hour", _MODEL)
_COLD_S = _gauge("model_cold_load_seconds", "What a load takes", _MODEL)
_PER_MODEL = (_RATE, _WAIT, _PROMISE, _REPLICAS, _WANTED, _VALUE, _COLD, _COLD_S)

_PRESSURE = _gauge("pool_memory_pressure", "Device bytes wanted / there; above 1 something is left out", ["pool"])
_NODES = _gauge("pool_nodes", "Healthy nodes", ["pool"])
_NODES_WANTED = _gauge("pool_nodes_wanted", "Nodes that all wanted replicas would fill", ["pool"])
_THRASH = _gauge("pool_thrash_index", "Share of the last hour's loads that brought back what had just left", ["pool"])


class PoolSignals:
    """Sets the gauges of one process."""

    def __init__(self) -> None:
        self._models: dict[PoolName, set[str]] = {}

    def show(self, pool: PoolName, signal: PoolSignal) -> None:
        """Show what is wanted now."""
        _PRESSURE.labels(pool).set(signal.memory_pressure)
        _NODES.labels(pool).set(signal.nodes)
        _NODES_WANTED.labels(pool).set(signal.nodes_wanted)
        _THRASH.labels(pool).set(signal.thrash_index)
        for model in signal.models:
            _show_model(pool, model)
        names = {model_of(model.version) for model in signal.models}
        for name in self._models.get(pool, set()) - names:
            for gauge in _PER_MODEL:
                gauge.remove(pool, name)
        self._models[pool] = names


def _show_model(pool: PoolName, signal: ModelSignal) -> None:
    name = model_of(signal.version)
    _RATE.labels(pool, name).set(signal.rate_per_s)
    _WAIT.labels(pool, name).set(signal.wait_ms_mean / 1000)
    _PROMISE.labels(pool, name).set(signal.promise_ms / 1000)
    _REPLICAS.labels(pool, name).set(signal.replicas)
    _WANTED.labels(pool, name).set(signal.replicas_wanted)
    _VALUE.labels(pool, name).set(signal.value_per_mib_s / 1000)
    _COLD.labels(pool, name).set(signal.cold_loads_per_hour)
    _COLD_S.labels(pool, name).set(signal.cold_load_ms / 1000)

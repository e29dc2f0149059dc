"""Answers operators who ask why a model is, or is not, warm (`roundhouse models forecast NAME`)."""

from roundhouse.vocabulary import ModelName
from roundhouse.wire.v1 import residency_pb2
from services.scheduler.domain.records import version_key
from services.scheduler.operations.foresight import PREWARM_LEAST_PER_MINUTE, Foresight
from services.scheduler.ports import CatalogueSource


def explain_forecast(foresight: Foresight, catalogue: CatalogueSource, name: str) -> residency_pb2.ForecastReply:
    """What is known about a model's future, from memory alone; `known` is false for a name that is no model."""
    model = catalogue.current.models.get(ModelName(name))
    if model is None:
        return residency_pb2.ForecastReply()
    version = version_key(model.name, model.digest)
    reply = residency_pb2.ForecastReply(
        known=True, pool=model.pool, prewarm_least_per_minute=PREWARM_LEAST_PER_MINUTE, promise_ms=model.ttft_slo_ms
    )
    signal = next((each for each in foresight.signals(model.pool).models if each.version == version), None)
    if signal is not None:
        reply.requests_per_s = signal.rate_per_s
        reply.queue_ms_mean = signal.wait_ms_mean
        reply.replicas, reply.replicas_wanted = signal.replicas, signal.replicas_wanted
        reply.replicas_reason = signal.reason
        reply.value_per_mib_s = signal.value_per_mib_s
        reply.load_ms = signal.cold_load_ms
    found = foresight.explain(model.pool, version)
    if found is not None:
        reply.wanted_before = True
        reply.predictor = found.predictor
        reply.loss_by_predictor.update(found.loss_by_predictor)
        reply.arrivals, reply.idle_ms = found.arrivals, found.idle_ms
        reply.next_ms_p10, reply.next_ms_p50, reply.next_ms_p90 = (
            found.next_ms_p10,
            found.next_ms_p50,
            found.next_ms_p90,
        )
        reply.warm_arrivals_per_minute = found.worth_per_s * 60
        reply.text = found.text
    return reply

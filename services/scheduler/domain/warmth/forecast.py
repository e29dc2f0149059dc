"""When each model is wanted next: for every model the predictor that would have foreseen its own past best.

The default is the histogram; another predictor is chosen when its back-test is clearly better. The back-test is the log
score, decayed: minus the log of the density a predictor gave to each gap before it saw it. It is proper: no predictor
gains by claiming to be surer than it is. An arrival costs O(predictors); a law is made when it is asked for and kept
until the next arrival. Memory a model is bounded (`gap_counts.BINS_MOST`).

It does not decide: eviction, keep-alive and the plan do.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.scheduler.domain.records import VersionKey
from services.scheduler.domain.warmth.gap_bins import GapBins
from services.scheduler.domain.warmth.gap_counts import Population
from services.scheduler.domain.warmth.gap_law import GapLaw, law
from services.scheduler.domain.warmth.predictors import (
    EXPONENTIAL_WEIGHT,
    LONG_KEEP,
    RECENT_KEEP,
    Arrival,
    Coarse,
    Context,
    DayProfile,
    Fine,
    Pooled,
    Predictor,
    Trend,
)

STEP_MS = 1_000  # arrivals closer than this are one: a load takes longer
LOSS_KEEP = 0.95  # the back-test looks at the last 20 gaps
NAMES = ("histogram", "pooled", "timer", "recent", "trend", "day")
MARGIN_MEAN = 0.3  # nats a gap by which another predictor must beat the histogram, and in all: switching on noise
MARGIN_TOTAL = 1.0  # costs hits. Both tuned on the first halves of the traces (0.1 to 1 and 0.1 to 5)
DENSITY_LEAST = 1e-15  # a gap that a predictor held impossible costs it 35 nats, not infinity


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a forecast is what it is; for `roundhouse models forecast` and the audit stream."""

    version: VersionKey
    predictor: str
    loss_by_predictor: Mapping[str, float]  # mean log score over the last 20 gaps, nats; less is better
    arrivals: int
    idle_ms: int
    next_ms_p10: int  # from now
    next_ms_p50: int
    next_ms_p90: int
    worth_per_s: float  # arrivals served warm per second of a place in memory

    @property
    def text(self) -> str:
        """One sentence."""
        return (
            f"{self.predictor} foresees the next request in {self.next_ms_p50 / 1000:.0f} s "
            f"({self.next_ms_p10 / 1000:.0f} to {self.next_ms_p90 / 1000:.0f}) after {self.arrivals} arrivals"
        )


@dataclass(slots=True)
class ModelForecast:
    """One model's past. Mutable; owned by `Forecaster`."""

    predictors: tuple[Predictor, ...]
    context: Context
    arrivals: int = 1
    losses: list[float] = field(default_factory=lambda: [0.0] * len(NAMES))
    scored: float = 0.0
    law: GapLaw | None = None

    @property
    def last_ms(self) -> int:
        """The last arrival."""
        return self.context.at_ms

    @property
    def chosen(self) -> int:
        """The predictor with the least loss, if it clearly beats the default."""
        best = min(self.losses)
        gain = self.losses[0] - best
        return self.losses.index(best) if gain > max(MARGIN_TOTAL, MARGIN_MEAN * self.scored) else 0


@dataclass(slots=True)
class Forecaster:
    """The forecasts of all models of a pool."""

    step_ms: int = STEP_MS
    models: dict[VersionKey, ModelForecast] = field(default_factory=dict)
    bins: GapBins = field(init=False)
    population: Population = field(init=False)

    def __post_init__(self) -> None:
        self.bins = GapBins(self.step_ms)
        self.population = Population(self.bins)

    def record(self, version: VersionKey, at_ms: int) -> None:
        """An arrival. Arrivals of one model within a step count once; time must not run backwards for a model."""
        model = self.models.get(version)
        if model is None:
            self.models[version] = ModelForecast(self._predictors(), Context(at_ms))
            return
        gap_ms = at_ms - model.last_ms
        if gap_ms < self.step_ms:
            return
        arrival = Arrival(at_ms, gap_ms, self.bins.coarse(gap_ms), self.bins.index(gap_ms), model.context)
        for place, predictor in enumerate(model.predictors):
            score = math.log(max(DENSITY_LEAST, predictor.density(arrival)))
            model.losses[place] = LOSS_KEEP * model.losses[place] - score
            predictor.learn(arrival)
        model.scored = LOSS_KEEP * model.scored + 1
        self.population.add(model.context.row, arrival.coarse, arrival.fine == model.context.again)
        model.context, model.law = Context(at_ms, arrival.coarse + 1, arrival.fine), None
        model.arrivals += 1

    def law(self, version: VersionKey) -> GapLaw | None:
        """The law of the current gap; None for a model that was never wanted. O(bins) after an arrival, then O(1)."""
        model = self.models.get(version)
        if model is None:
            return None
        if model.law is None:
            model.law = law(model.predictors[model.chosen].pieces(model.context))
        return model.law

    def idle_ms(self, version: VersionKey, now_ms: int) -> int:
        """How long ago the last arrival was; 0 for a model that was never wanted."""
        model = self.models.get(version)
        return 0 if model is None else max(0, now_ms - model.last_ms)

    def worth_per_ms(self, version: VersionKey, now_ms: int) -> float:
        """Arrivals served warm per ms of a place in memory from now on; 0 for a model that was never wanted."""
        found = self.law(version)
        return 0.0 if found is None else found.worth_per_ms(self.idle_ms(version, now_ms))

    def forget(self, version: VersionKey) -> None:
        """Drop a model that the catalogue does not have any more. Idempotent."""
        self.models.pop(version, None)

    def explain(self, version: VersionKey, now_ms: int) -> Explanation | None:
        """The forecast with its reasons; None for a model that was never wanted."""
        model, found = self.models.get(version), self.law(version)
        if model is None or found is None:
            return None
        idle_ms = self.idle_ms(version, now_ms)
        p10, p50, p90 = (int(found.quantile_ms(idle_ms, share)) for share in (0.1, 0.5, 0.9))
        mean_loss = {name: loss / max(1.0, model.scored) for name, loss in zip(NAMES, model.losses, strict=True)}
        worth = found.worth_per_ms(idle_ms) * 1000
        return Explanation(version, NAMES[model.chosen], mean_loss, model.arrivals, idle_ms, p10, p50, p90, worth)

    def _predictors(self) -> tuple[Predictor, ...]:
        return (
            Coarse(self.bins, self.population, LONG_KEEP, EXPONENTIAL_WEIGHT),
            Pooled(self.population),
            Fine(self.bins, self.population),
            Coarse(self.bins, self.population, RECENT_KEEP, 1.0),
            Trend(self.bins),
            DayProfile(),
        )

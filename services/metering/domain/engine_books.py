"""Tokens that engines counted against tokens in the ledger, by model. Pure.

Engines count requests when they end and forget when a model is unloaded, so this says less than the comparison by
request: it shows that a model's tokens are not billed, or billed and never generated, beyond what requests at both ends
of the window, and cancelled ones whose last pieces nobody took, can explain.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from roundhouse.subjects import encode_token
from services.metering.domain.reconciling import Difference, Kind

ALLOWED_TOKENS: Final = 4_096  # a guess: some requests at both ends of a window
ALLOWED_SHARE: Final = 0.02  # a guess: what cancelled requests had ready when they ended
Counter = tuple[int, int]  # input and output tokens
Sample = Mapping[tuple[str, str], Counter]  # (server, Triton's name of the model) → what it has counted since its load


class EngineLine(Struct, frozen=True):
    """One model over a window. `whole`: no counter was lost in it, so the engines' sums are no lower bounds only."""

    model: str
    engine_input: int
    engine_output: int
    ledger_input: int
    ledger_output: int
    whole: bool

    @property
    def differs(self) -> bool:
        """Whether the difference is more than can be explained."""
        missing = max(self.engine_input - self.ledger_input, self.engine_output - self.ledger_output)
        beyond = max(self.ledger_input - self.engine_input, self.ledger_output - self.engine_output)
        allowed = ALLOWED_TOKENS + ALLOWED_SHARE * (self.engine_input + self.engine_output)
        return missing > allowed or (self.whole and beyond > allowed)

    def difference(self) -> Difference:
        """How it is reported: no single request is known."""
        detail = (
            f"{self.model}: engines counted {self.engine_input}+{self.engine_output} tokens,"
            f" the ledger has {self.ledger_input}+{self.ledger_output}"
        )
        return Difference(Kind.ENGINE_DIFFERS, "", "", detail)


@dataclass(slots=True)
class Growth:
    """What engines have counted since the first sample of a window."""

    last: Sample | None = None
    counted: dict[str, Counter] = field(default_factory=dict)  # by model, as Triton's names begin
    partial: set[str] = field(default_factory=set)  # models of which a counter was lost

    def add(self, sample: Sample) -> None:
        """A later sample. A counter that is new, or lower than before, began at nothing; one that is gone is lost."""
        if self.last is not None:
            for place, now in sample.items():
                before = self.last.get(place, (0, 0))
                if now[0] < before[0] or now[1] < before[1]:
                    self.partial.add(_model(place[1]))
                    before = (0, 0)
                known = self.counted.get(_model(place[1]), (0, 0))
                self.counted[_model(place[1])] = (known[0] + now[0] - before[0], known[1] + now[1] - before[1])
            self.partial |= {_model(name) for server, name in self.last if (server, name) not in sample}
        self.last = sample

    def against(self, ledger: Iterable[tuple[str, Counter]]) -> list[EngineLine]:
        """One line for each model that engines count. `ledger`: tokens of the same window by catalogue name."""
        billed = {encode_token(model): (model, tokens) for model, tokens in ledger}
        lines = []
        for name, (engine_input, engine_output) in sorted(self.counted.items()):
            model, tokens = billed.get(name, (name, (0, 0)))
            lines.append(EngineLine(model, engine_input, engine_output, *tokens, name not in self.partial))
        return lines


def _model(triton_name: str) -> str:
    """The encoded catalogue name: Triton's names are `<name>--<digest>`."""
    return triton_name.rpartition("--")[0] or triton_name

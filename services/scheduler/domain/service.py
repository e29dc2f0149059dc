"""The arithmetic of service: integers only, so that the Lua scripts give bit for bit the same answers.

One unit is one uncached input token; an output token counts two (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024, section 4.1: decoding a token costs about twice a prefilled one). A tenant's counter is kept in
thousandths of a unit divided by its weight. Lua numbers are doubles: every value here stays below 2^52, where the
floor of a quotient is exact; at 1,000,000 tokens a request that is four million requests of one tenant in a lane.
"""

from dataclasses import dataclass

from roundhouse.vocabulary import PriorityClass

OUTPUT_UNITS = 2
FIRST_OUTPUT_TOKENS = 256  # predicted for a model without history; a guess, corrected from the first answer on
FIRST_RUN_MS = 1_000  # the same for device time; a guess
AVERAGE_SHIFT = 8  # moving averages take 1/8 of each new value: about the last dozen requests (as TCP's RTT does)


@dataclass(frozen=True, slots=True)
class Policy:
    """How capacity is divided. The defaults of the shares are in docs/decisions/0031."""

    interactive_milli: int = 500
    standard_milli: int = 300
    batch_milli: int = 200
    ageing_per_ms: int = 100  # thousandths of a unit that a class gains for each ms its oldest request waits; a guess
    credit_requests: int = 2  # what an idle tenant may save up (invariant 5), in requests of its average cost
    lease_ms: int = 10_000
    retry_ms: int = 500  # between two deliveries of one grant or refusal: a lost one still arrives within a second
    delivery_ms_max: int = 10_000  # a refusal nobody acknowledges is dropped after this: its gateway is gone
    tombstone_ms: int = 120_000  # how long an ended attempt is remembered; heartbeats repeat an ending for seconds
    device_time: bool = False  # a unit is one ms of a slot instead of a token
    overload_ms: int = 30_000  # batch is shed while the others' backlog takes longer than this; 0 = never; a guess
    batch_pause_ms: int = 60_000  # and paused, but no request of it for longer than this; a guess

    @property
    def stale_ms(self) -> int:
        """A caller whose clock is this far behind what others said has slept or is wrong: it may hand nothing out."""
        return self.lease_ms // 4

    def share_milli(self, priority_class: PriorityClass) -> int:
        """The guaranteed share of a class, in thousandths."""
        match priority_class:
            case PriorityClass.INTERACTIVE:
                return self.interactive_milli
            case PriorityClass.STANDARD:
                return self.standard_milli
            case PriorityClass.BATCH:
                return self.batch_milli


def cost_units(input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Units that a request costs: uncached input once, output twice."""
    return max(0, input_tokens - cached_tokens) + OUTPUT_UNITS * output_tokens


def charge_milli(units: int, weight_milli: int) -> int:
    """What `units` add to the counter of a tenant (or to the pass of a class) of that weight."""
    return units * 1_000_000 // weight_milli


def moved_average(average_milli: int, value: int) -> int:
    """A moving average in thousandths after one more value; the first value (average 0) counts whole."""
    if average_milli == 0:
        return value * 1000
    return average_milli + (value * 1000 - average_milli) // AVERAGE_SHIFT


def predicted_output(tenant_milli: int, model_milli: int, max_output_tokens: int) -> int:
    """Output tokens to charge at dispatch: by the tenant's recent outputs of the model, else by all tenants'."""
    average_milli = tenant_milli or model_milli
    expected = average_milli // 1000 if average_milli else FIRST_OUTPUT_TOKENS
    return min(max_output_tokens, expected)


def credit_milli(average_cost_milli: int, weight_milli: int, requests: int) -> int:
    """The burst credit of a tenant on the scale of its counter (invariant 5)."""
    return requests * average_cost_milli * 1000 // weight_milli

"""What engines counted against the ledger: growth over loads and unloads, and when a difference is one."""

from services.metering.adapters.engine_metrics import Counted, parse_counters
from services.metering.domain.engine_books import EngineLine, Growth, Sample


def grown(*samples: Sample) -> Growth:
    """The growth over samples."""
    growth = Growth()
    for sample in samples:
        growth.add(sample)
    return growth


A, B = ("n1", "m--111111111111"), ("n2", "m--111111111111")


def test_growth_is_added_up_over_servers_and_begins_at_the_first_sample() -> None:
    """100 before the window do not count; 40 on one server and 7 of a model loaded meanwhile on another do."""
    growth = grown({A: (1, 100)}, {A: (3, 120)}, {A: (3, 140), B: (2, 7)})
    assert growth.counted == {"m": (4, 47)}  # input 3 - 1 + 2, output 140 - 100 + 7
    assert growth.partial == set()


def test_a_reload_and_an_unload_make_it_a_lower_bound() -> None:
    """A counter that fell began anew: 120 - 100, then 5; one that is gone is not subtracted."""
    reloaded = grown({A: (0, 100)}, {A: (0, 120)}, {A: (0, 5)})
    assert (reloaded.counted, reloaded.partial) == ({"m": (0, 25)}, {"m"})
    assert grown({A: (0, 100)}, {A: (0, 120)}, {}).partial == {"m"}


def test_a_difference_is_more_than_the_ends_of_the_window_explain() -> None:
    """4,096 + 2% of 100,000 are allowed. Billed beyond a lower bound is none; generated and not billed is one."""
    growth = grown({A: (0, 0)}, {A: (0, 100_000)})
    cases = {100_000: False, 94_000: False, 93_800: True, 106_000: False, 106_200: True, 0: True}
    assert {
        tokens: growth.against([("m", (0, tokens))])[0].differs for tokens in cases
    } == cases  # 100,000 - 6,096 = 93,904
    assert growth.against([])[0].difference().detail == ("m: engines counted 0+100000 tokens, the ledger has 0+0")
    growth.partial.add("m")
    assert not growth.against([("m", (0, 200_000))])[0].differs
    assert growth.against([("m", (0, 0))])[0].differs


def test_models_that_no_engine_counts_are_not_compared() -> None:
    """And names are compared as Triton writes them."""
    growth = grown({}, {("n", "a=2Fb--22"): (1, 2)})
    assert growth.against([("a/b", (1, 2)), ("onnx", (5, 5))]) == [EngineLine("a/b", 1, 2, 1, 2, True)]


def test_pages_of_both_engines_are_read() -> None:
    """Our counters and the vLLM backend's; other families and odd lines are passed over."""
    page = """# HELP roundhouse_engine_prompt_tokens_total x
roundhouse_engine_prompt_tokens_total{model="m--1"} 33.000000
roundhouse_engine_output_tokens_total{model="m--1"} 15
vllm:prompt_tokens_total{model="v",version="1"} 1e3
vllm:generation_tokens_total{model="v",version="1"} 7
nv_inference_count{model="m--1",version="1"} 4
"""
    assert parse_counters(page) == {"m--1": Counted(33, 15), "v": Counted(1000, 7)}

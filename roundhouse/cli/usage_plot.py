"""Usage drawn in the terminal. What is drawn is rounded to what a character can show; the table is exact."""

import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import plotext

WIDTH_MAX: Final = 160
PERIODS: Final = ("day", "hour")
SERIES_MAX: Final = 8  # more colours than that nobody tells apart; the smallest are drawn as one
TICK_WIDTH: Final = 18  # what a name or an hour takes below the axis
_HEIGHT: Final = 20


def plot_usage(rows: Sequence[dict[str, Any]], groups: Sequence[str], shown: str) -> str:
    """Lines over time if a day or an hour is among the groups, else a bar a group; one drawing a currency."""
    if not rows:
        return "nothing was used"
    by_currency: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_currency[row["currency"] if shown == "amount" else ""].append(row)
    period = next((name for name in groups if name in PERIODS), None)
    others = [name for name in groups if name != period]
    drawings = []
    for currency, part in by_currency.items():
        title = f"{shown} {currency}".strip()
        drawings.append(
            _bars(part, others, shown, title) if period is None else _over_time(part, period, others, shown, title)
        )
    return "\n".join(drawings)


def _over_time(rows: Sequence[dict[str, Any]], period: str, others: Sequence[str], shown: str, title: str) -> str:
    times = sorted({str(row[period]) for row in rows})
    series: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        series[_name(row, others)][str(row[period])] += float(row[shown])
    figure = _figure(title)
    _scale(figure, [value for values in series.values() for value in values.values()])
    places = list(range(1, len(times) + 1))
    for name, values in _largest(series).items():
        points = figure.signal(places, [values.get(time, 0.0) for time in times], marker="braille").lines()
        figure.draw(points.label(name) if name else points)
    step = max(1, len(times) * TICK_WIDTH // _width())
    figure.ruler("x").ticks(places[::step], times[::step])
    return _text_of(figure)


def _bars(rows: Sequence[dict[str, Any]], groups: Sequence[str], shown: str, title: str) -> str:
    values: dict[str, float] = defaultdict(float)
    for row in rows:
        values[_name(row, groups)] += float(row[shown])
    largest = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    kept = largest[: max(1, _width() // TICK_WIDTH)]
    figure = _figure(title if len(kept) == len(largest) else f"{title}: the {len(kept)} largest of {len(largest)}")
    _scale(figure, [value for _, value in kept])
    places = list(range(1, len(kept) + 1))
    figure.draw(figure.bar(places, [value for _, value in kept], width=0.6))
    figure.ruler("x").ticks(places, [name[: TICK_WIDTH - 1] or "all" for name, _ in kept])
    return _text_of(figure)


def _largest(series: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    ranked = sorted(series, key=lambda name: (-sum(series[name].values()), name))
    kept = {name: series[name] for name in ranked[:SERIES_MAX]}
    if len(ranked) > SERIES_MAX:
        rest: dict[str, float] = defaultdict(float)
        for name in ranked[SERIES_MAX:]:
            for time, value in series[name].items():
                rest[time] += value
        kept[f"{len(ranked) - SERIES_MAX} others"] = rest
    return kept


def _figure(title: str) -> Any:
    figure = plotext.figure  # the library has this one; it is cleared before each drawing
    figure.clear()
    figure.title(title)
    figure.plot_size(_width(), _HEIGHT)
    return figure


def _scale(figure: Any, values: Sequence[float]) -> None:
    """From zero to the largest; the library's own choice hides amounts that are far below one."""
    low, high = min(0.0, *values), max(0.0, *values)
    figure.ruler("y").lim(low, high if high > low else 1.0)


def _text_of(figure: Any) -> str:
    drawn = str(figure.build())
    return drawn if sys.stdout.isatty() else str(plotext.uncolorize(drawn))


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, WIDTH_MAX)


def _name(row: dict[str, Any], groups: Sequence[str]) -> str:
    return " ".join(str(row[name]) or "-" for name in groups)

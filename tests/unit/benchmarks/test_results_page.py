"""The page of benchmarks says what the committed runs say."""

import json

from benchmarks.report import Goal, Report
from benchmarks.results_page import PAGE, read_results, render


def test_the_page_is_that_of_the_committed_runs() -> None:
    """Else: `python -m benchmarks.results_page`."""
    assert PAGE.read_text() == render(read_results())


def test_a_missed_goal_is_shown_as_missed() -> None:
    """One of two is met: the summary counts it, the table marks the other."""
    goals = [Goal.at_least("put_share", 0.75, 0.5), Goal.at_most("double", 0, 0)]
    report = Report("store", {"put": 1.0}, goals=goals)
    page = render({"store": {**json.loads(report.as_json()), "machine": {"commit": "abc", "cores": 2}}})
    assert "| [store](#store) | 1 of 2 | abc | 2 |" in page
    assert "| put share | >= 0.75 | 0.5 | **missed** |" in page
    assert "| double | <= 0 | 0 | met |" in page

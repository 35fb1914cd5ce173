"""The end of a run of thousands of tests: skipped tests by reason, and the kit's verdicts in a line.

Failures are shown as ever. A run with `--hicache-quick` counts the verdicts that found nothing, and
`--hicache-report` writes each to a file. `pytest -rs` shows each skipped test.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

KIT = "hicache-conformance-verdicts"
_FINE = ("conformant", "incomplete")
_KIT_REASONS = {
    "not_declared": "checks of the kit: the store does not claim it",
    "not_verified": "checks of the kit: this run has no means to try it",
}
_MISSING = ("tests/get_servers.sh", "`make ")
"""What is in a reason that a command of the project removes. These reasons are all shown."""
_MOST_REASONS = 6


class ShortSummary:
    """The plugin, in the process that prints the summary."""

    @pytest.hookimpl(tryfirst=True)  # the kit shows the verdicts that are left
    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        kit: Any = config.pluginmanager.get_plugin(KIT)
        if kit is not None and config.option.hicache_quick:
            fine = [one for one in kit.verdicts if one.line.startswith(_FINE) and not one.fails]
            kit.verdicts = [one for one in kit.verdicts if one not in fine]
            if fine:
                place = config.option.hicache_report or "DIR with --hicache-report DIR"
                terminalreporter.write_line(
                    f"kit     {len(fine):>5}: verdicts without a broken rule; reports are in {place}"
                )
        skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
        for line in lines([str(place[2]).removeprefix("Skipped: ") for place in skipped]):
            terminalreporter.write_line(line)


def lines(reasons: list[str]) -> list[str]:
    """Return the lines about skipped tests, of which `reasons` has the reason of each."""
    counts = Counter(_KIT_REASONS.get(each.partition(":")[0], each) for each in reasons)
    ordered = [each for each, _ in counts.most_common()]
    missing = [each for each in ordered if any(words in each for words in _MISSING)]
    others = [each for each in ordered if each not in missing]
    shown = [*missing, *others[:_MOST_REASONS]]
    found = [f"skipped {counts[each]:>5}: {each}" for each in shown]
    rest = counts.total() - sum(counts[each] for each in shown)
    if rest:
        found.append(f"skipped {rest:>5}: {len(counts) - len(shown)} more reasons; -rs shows each")
    return found

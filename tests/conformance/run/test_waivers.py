from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from hicache_conformance.run.outcomes import Outcome, Verdict
from hicache_conformance.run.waivers import Waiver, read_waivers
from records import check_record, record

from hicache_storage.errors import ConfigError

TODAY = dt.datetime.now(dt.UTC).date()
TOMORROW = TODAY + dt.timedelta(days=1)  # a run may see midnight
PASSED = check_record("KV-001", Outcome.PASSED)


def waiver(rule: str = "KV-005", until: dt.date = TOMORROW) -> dict[str, Waiver]:
    link = "https://example.org/issues/12"
    return {rule: Waiver(rule=rule, reason="known", link=link, until=until)}


def test_a_waived_violation_makes_the_verdict_partial() -> None:
    given = record(PASSED, check_record("KV-005", Outcome.FAILED), waivers=waiver())

    assert (Outcome.WAIVED, Verdict.PARTIAL) == (given.rules[1].outcome, given.verdict)
    assert given.rules[1].waiver is not None
    assert given.rules[1].waiver.until == TOMORROW.isoformat()


@pytest.mark.parametrize("outcome", [Outcome.PASSED, Outcome.NOT_DECLARED])
def test_a_waiver_that_is_not_needed_is_an_error(outcome: Outcome) -> None:
    given = record(PASSED, check_record("KV-005", outcome), waivers=waiver())

    assert (Outcome.ERROR, Verdict.INCONCLUSIVE) == (given.rules[1].outcome, given.verdict)
    assert "stale" in given.rules[1].checks[-1].message


def test_a_waiver_that_has_ended_waives_nothing() -> None:
    ended = waiver(until=TODAY - dt.timedelta(days=1))

    given = record(PASSED, check_record("KV-005", Outcome.FAILED), waivers=ended)

    assert given.verdict == Verdict.FAILED
    assert "ended on" in given.rules[1].checks[-1].message


def test_waivers_are_read_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(
        '[[waiver]]\nrule = "KV-005"\nreason = "slow server"\nlink = "https://example.org/1"\n'
        "until = 2030-01-31\n"
    )

    waivers = read_waivers(path)

    assert dt.date(2030, 1, 31) == waivers["KV-005"].until


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[[waiver]]\nrule = "KV-999"', "KV-999"),
        ('[[waiver]]\nrule = "KV-005"', "reason"),
        ('[[waiver]]\nrule = "KV-005"\nreason = ""', "reason"),
        ('[[waiver]]\nrule = "KV-005"\nreason = "a"\nlink = "soon"', "link"),
        ('[[waiver]]\nrule = "KV-005"\nreason = "a"\nlink = "https://a"', "until"),
        ("[[waivers]]", "waivers"),
        ("[[waiver", "TOML"),
    ],
)
def test_a_waiver_that_lacks_something_is_refused_by_name(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "waivers.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=named):
        read_waivers(path)


def test_a_rule_is_waived_once(tmp_path: Path) -> None:
    one = '[[waiver]]\nrule = "KV-005"\nreason = "a"\nlink = "https://a"\nuntil = 2030-01-31\n'
    path = tmp_path / "waivers.toml"
    path.write_text(one + one)

    with pytest.raises(ConfigError, match="twice"):
        read_waivers(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_waivers(tmp_path / "nowhere.toml")

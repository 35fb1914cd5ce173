from __future__ import annotations

import io

import pytest
from hicache_conformance.report.record import Record
from hicache_conformance.report.terminal import Progress, print_summary
from hicache_conformance.run.outcomes import Outcome, Verdict
from report_samples import TORN, check_of, conformant, failed, partial, record_of, rule_of
from rich.console import Console


def summary(record: Record, width: int = 80) -> str:
    out = io.StringIO()
    print_summary(record, Console(file=out, width=width))
    return out.getvalue()


def every_outcome() -> Record:
    rules = (rule_of("KV-301", outcome) for outcome in Outcome)
    return record_of(*rules, verdict=Verdict.FAILED)


def test_a_failure_shows_the_rule_what_was_expected_what_came_and_the_sequence() -> None:
    shown = summary(failed(), width=120)

    for line in (
        "FAILED  KV-003 A hit is exactly the bytes that were set",
        "  The model attends to a wrong prefix: plausible, silently wrong answers.",
        "  problem   a hit holds other bytes than were set",
        "  expected  the 4096 bytes that were set, or a miss",
        r"  came      4096 bytes: the right ones up to 2048, then <zeros> & \x1b[31mmore",
        "            store.batch_get(5feceb66, 6b86b273) -> [True, True]",
    ):
        assert line in shown.splitlines()
    assert "--rules KV-003" in shown


def test_passed_checks_are_not_listed_one_by_one() -> None:
    shown = summary(failed())

    assert TORN.title in shown
    assert shown.count("  check ") == 2


def test_the_verdict_is_shown_with_its_meaning() -> None:
    assert "CONFORMANT, 1 RULE NOT TRIED  acme: All 3 rules that" in summary(conformant())


def test_the_words_of_the_store_about_itself_are_shown() -> None:
    assert "  server: Acme 7.2.4, master\n" in summary(conformant())


def test_reasons_that_no_block_shows_are_under_the_verdict() -> None:
    reason = "  KV-005 Setting a present page succeeds and leaves it whole: waived"

    assert reason in summary(partial()).splitlines()
    assert "set: failed" not in summary(failed())


def test_checks_not_verified_are_shown_once_for_each_reason() -> None:
    doorless = [
        rule_of(
            name,
            Outcome.NOT_VERIFIED,
            *(
                check_of(name, Outcome.NOT_VERIFIED, name=f"{name}:{n}", message="needs `tamper`")
                for n in range(2)
            ),
        )
        for name in ("KV-403", "KV-404")
    ]

    assert "not verified, needs `tamper`: KV-403, KV-404\n" in summary(record_of(*doorless))


@pytest.mark.parametrize("record", [conformant(), failed(), partial(), every_outcome()])
def test_eighty_columns_are_enough(record: Record) -> None:
    lines = summary(record).splitlines()

    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_every_outcome_has_its_count_in_the_row_of_its_family() -> None:
    [row] = [line for line in summary(every_outcome()).splitlines() if "Lifecycle" in line]

    assert row.split() == ["Lifecycle", "and", "errors", *(["1"] * len(Outcome))]


def test_a_run_without_rules_has_no_table() -> None:
    shown = summary(record_of(verdict=Verdict.INCONCLUSIVE, reasons=("connection refused",)))

    assert shown.startswith("INCONCLUSIVE  acme: ")
    assert "  connection refused\n" in shown


def test_a_file_gets_no_escape_codes() -> None:
    assert "\x1b" not in summary(failed())


def test_a_terminal_gets_colours_and_no_code_of_the_store_s() -> None:
    out = io.StringIO()

    print_summary(failed(), Console(file=out, width=120, force_terminal=True))

    assert "\x1b[" in out.getvalue()
    assert r"\x1b[31mmore" in out.getvalue()


def test_progress_in_a_file_is_a_line_a_family() -> None:
    out = io.StringIO()

    with Progress(total=3, console=Console(file=out, width=80)) as progress:
        progress.advance(check_of("KV-001"))
        progress.advance(check_of("KV-003", Outcome.FAILED))
        assert out.getvalue() == ""
        progress.advance(check_of("KV-101"))
        assert out.getvalue() == "Basics: 2 checks: 1 passed, 1 failed\n"

    assert out.getvalue().splitlines()[1:] == ["Key spaces: 1 check: 1 passed"]


def test_progress_on_a_terminal_is_one_line_that_leaves_again() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True)

    with Progress(total=2, console=console) as progress:
        progress.advance(check_of("KV-001", Outcome.FAILED))
        progress.advance(check_of("KV-101"))

    assert "Key spaces" in out.getvalue()
    assert "1 failed" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_a_check_of_no_known_rule_does_not_stop_the_progress() -> None:
    out = io.StringIO()

    with Progress(total=1, console=Console(file=out)) as progress:
        progress.advance(check_of("XX-1"))

    assert out.getvalue() == "Other: 1 check: 1 passed\n"

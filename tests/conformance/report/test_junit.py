from __future__ import annotations

from xml.etree import ElementTree as ET

from hicache_conformance.report.junit import junit_xml
from hicache_conformance.report.record import Record
from hicache_conformance.run.outcomes import Outcome
from report_samples import DOORLESS, check_of, failed, partial, record_of, rule_of


def parsed(record: Record) -> ET.Element:
    return ET.fromstring(junit_xml(record).encode())  # noqa: S314 - our own file


def the(record: Record, path: str) -> ET.Element:
    """Return the only element at `path`."""
    [found] = parsed(record).findall(path)
    return found


def test_a_suite_is_a_family_and_a_case_a_check() -> None:
    suites = parsed(failed()).findall("testsuite")

    assert [suite.get("name") for suite in suites] == ["Basics", "Lifecycle and errors"]
    assert [case.get("name") for case in suites[0].findall("testcase")] == [
        "a_fact",
        "a_fact",
        "a_hit_is_whole",
    ]
    assert the(failed(), ".//testcase[@name='a_hit_is_whole']").get("classname") == "acme.KV-003"


def test_counts_are_the_sums_of_the_suites() -> None:
    root = parsed(failed())

    counts = ("tests", "failures", "errors", "skipped")
    assert {name: root.get(name) for name in counts} == {
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "0",
    }


def test_a_failure_shows_the_expected_and_the_actual_result_and_the_sequence() -> None:
    failure = the(failed(), ".//failure")

    assert failure.get("message") == "failed: a hit holds other bytes than were set"
    text = failure.text or ""
    assert "expected: the 4096 bytes that were set, or a miss" in text
    assert r"came:     4096 bytes: the right ones up to 2048, then <zeros> & \x1b[31mmore" in text
    assert "  store.batch_get(5feceb66, 6b86b273) -> [True, True]" in text


def test_a_waived_failure_is_skipped_with_the_waiver() -> None:
    message = the(partial(), ".//skipped").get("message", "")

    assert message.startswith("waived: the second set returned False (until 2027-03-31: ")
    assert "https://example.org/issues/12" in message


def test_a_check_not_verified_is_skipped_with_the_reason() -> None:
    record = record_of(rule_of("KV-403", Outcome.NOT_VERIFIED, DOORLESS))

    assert the(record, ".//skipped").get("message") == (
        "not verified: needs the back door `tamper`"
    )


def test_a_rule_on_trial_is_skipped_until_the_run_is_strict() -> None:
    trial = rule_of("KV-002", Outcome.FAILED, level="provisional")

    assert the(record_of(trial), ".//skipped") is not None
    assert the(record_of(trial, strict=True), ".//failure") is not None


def test_a_rule_without_checks_is_skipped() -> None:
    rule = rule_of("KV-402", Outcome.NOT_VERIFIED).model_copy(update={"checks": ()})

    assert the(record_of(rule), ".//skipped").get("message") == "not verified: no check of it ran"


def test_properties_hold_the_verdict_the_seed_and_the_spec() -> None:
    [first, *_] = parsed(failed()).findall("testsuite")
    found = {one.get("name"): one.get("value") for one in first.iter("property")}

    assert found["verdict"] == "failed"
    assert (found["seed"], found["spec"]) == ("7", "1.0")


def test_text_that_xml_forbids_is_escaped() -> None:
    check = check_of("KV-001", Outcome.FAILED, message='\x00 \ufffe ]]> <&"')

    failure = the(record_of(rule_of("KV-001", Outcome.FAILED, check)), ".//failure")

    assert failure.get("message") == r"failed: \x00 \ufffe ]]> <&" + '"'

"""`junit.xml`, for tools that show test results: a suite for each family, a test case for each check."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from hicache_conformance.report.wording import families, is_on_trial, label, verdict_words, weighed
from hicache_conformance.run.outcomes import Outcome
from hicache_storage.markup import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_conformance.report.record import CheckRecord, Record, RuleRecord

_TAGS = {Outcome.FAILED: "failure", Outcome.ERROR: "error"}
"""These outcomes are failures. All others except passed are `skipped`, as in the verdict."""


def junit_xml(record: Record) -> str:
    """Return the whole file."""
    root = ET.Element("testsuites", {"name": f"hicache conformance of {_name(record)}"})
    for family, rules in families(record.rules).items():
        root.append(_suite(record, family, rules))
    for count in ("tests", "failures", "errors", "skipped"):
        root.set(count, str(sum(int(suite.get(count, "0")) for suite in root)))
    root.set("time", f"{record.run.elapsed_s:.3f}")
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _name(record: Record) -> str:
    return printable(record.subject.name)


def _suite(record: Record, family: str, rules: Sequence[RuleRecord]) -> ET.Element:
    suite = ET.Element("testsuite", {"name": family})
    suite.set("timestamp", record.run.started_at.isoformat(timespec="seconds"))
    suite.append(_properties(record))
    for rule in rules:
        suite.extend(_case(record, rule, check) for check in rule.checks)
        suite.extend(_left_out_case(record, rule, name) for name in rule.left_out)
        if not rule.checks and not rule.left_out:
            suite.append(_empty_case(record, rule))
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for tag, count in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(count, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    return suite


def _properties(record: Record) -> ET.Element:
    properties = ET.Element("properties")
    run, subject = record.run, record.subject
    for name, value in (
        ("verdict", verdict_words(record.verdict, record.counts())),
        *(("reason", reason) for reason in record.reasons),
        ("seed", str(run.seed)),
        ("spec", run.spec),
        ("kit", run.kit),
        ("store", subject.target),
        ("version", subject.version),
    ):
        if value:
            ET.SubElement(properties, "property", name=name, value=printable(value))
    return properties


def _case(record: Record, rule: RuleRecord, check: CheckRecord) -> ET.Element:
    case = ET.Element("testcase", classname=f"{_name(record)}.{rule.id}")
    case.set("name", printable(check.name.partition(":")[2] or check.name))
    case.set("time", f"{check.elapsed_s:.3f}")
    outcome = weighed(check, rule)
    if outcome is not Outcome.PASSED:
        tag = "skipped" if is_on_trial(rule, record) else _TAGS.get(outcome, "skipped")
        result = ET.SubElement(case, tag, message=printable(_message(rule, check)))
        result.text = printable(_details(rule, check))
    return case


def _empty_case(record: Record, rule: RuleRecord) -> ET.Element:
    return _skipped(record, rule, rule.title, f"{label(rule.outcome)}: no check of it ran")


def _left_out_case(record: Record, rule: RuleRecord, check: str) -> ET.Element:
    return _skipped(record, rule, check.partition(":")[2], "it did not run")


def _skipped(record: Record, rule: RuleRecord, name: str, message: str) -> ET.Element:
    case = ET.Element("testcase", classname=f"{_name(record)}.{rule.id}")
    case.set("name", printable(name))
    case.set("time", "0.000")
    ET.SubElement(case, "skipped", message=message)
    return case


def _message(rule: RuleRecord, check: CheckRecord) -> str:
    outcome = weighed(check, rule)
    words = f"{label(outcome)}: {check.message or check.title}"
    if outcome is Outcome.WAIVED and rule.waiver is not None:
        words += f" (until {rule.waiver.until}: {rule.waiver.reason} {rule.waiver.link})"
    return words


def _details(rule: RuleRecord, check: CheckRecord) -> str:
    lines = [f"{rule.id} {rule.title}", check.title, check.message]
    lines += [f"expected: {check.expected}"] if check.expected else []
    lines += [f"came:     {check.got}"] if check.got else []
    if check.sequence:
        lines += ["sequence:", *(f"  {line}" for line in check.sequence)]
    lines += [f"Without it: {rule.consequence}"] if rule.consequence else []
    return "\n".join(line for line in lines if line)

"""The rules on the HTML page, by family. The evidence of each is folded, unless the rule failed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hicache_conformance.report.markup import icon, prose, sentence
from hicache_conformance.report.wording import (
    MUST_ACT,
    families,
    is_on_trial,
    label,
    reproduction,
    tally,
    weighed,
)
from hicache_conformance.run.outcomes import Outcome
from hicache_storage.markup import element, link

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from hicache_conformance.report.record import CheckRecord, Record, RuleRecord, WaiverRecord
    from hicache_storage.markup import Child


def rules_section(record: Record) -> Element:
    """Return the section with all rules of a run."""
    return element(
        "section",
        element("h2", "Rules", id="rules-title"),
        *(
            child
            for family, rules in families(record.rules).items()
            for child in _family(record, family, rules)
        ),
        id="rules",
        aria_labelledby="rules-title",
    )


def pill(outcome: str) -> Element:
    """Return an outcome as a word on its color."""
    return element("span", label(outcome), class_=f"pill o-{outcome}")


def consequence_words(rule: RuleRecord) -> str:
    """Return the words that introduce the consequence of breaking a rule."""
    is_broken = rule.outcome in (Outcome.FAILED, Outcome.WAIVED)
    return "What it means: " if is_broken else "If it is broken: "


def _family(record: Record, family: str, rules: list[RuleRecord]) -> list[Element]:
    count = tally(Counter(rule.outcome for rule in rules))
    heading = element("h3", family, " ", element("small", count), class_="family")
    return [heading, *(_rule(record, rule) for rule in rules)]


def _rule(record: Record, rule: RuleRecord) -> Element:
    summary = element(
        "summary",
        icon(rule.outcome.value),
        element("span", rule.id, class_="id"),
        " ",
        element("span", rule.title, class_="title"),
        " ",
        pill(rule.outcome.value),
    )
    body = element(
        "div",
        element("p", *prose(rule.statement), class_="statement"),
        _consequence(rule),
        _waiver(rule.waiver) if rule.waiver else None,
        element("p", _remarks(record, rule), class_="remarks"),
        element("ul", *(_check(check, rule) for check in rule.checks), class_="checks")
        if rule.checks
        else element("p", "No check of it ran.", class_="remarks"),
        _left_out(rule),
        _reproduction(record, rule),
        class_="body",
    )
    made = element("details", summary, body, class_=f"rule o-{rule.outcome.value}", id=rule.id)
    if rule.outcome in MUST_ACT:
        made.set("open", "")
    return made


def _left_out(rule: RuleRecord) -> Element | None:
    """Yield the names of the checks that did not run."""
    if not rule.left_out:
        return None
    names = ", ".join(name.partition(":")[2] for name in rule.left_out)
    return element("p", element("b", "Did not run: "), names, class_="remarks")


def _consequence(rule: RuleRecord) -> Element | None:
    if not rule.consequence:
        return None
    return element("p", element("b", consequence_words(rule)), *prose(rule.consequence))


def _remarks(record: Record, rule: RuleRecord) -> str:
    words = [f"{rule.level} rule", f"since {rule.since}"]
    words += [f"needs {', '.join(rule.needs)}"] if rule.needs else []
    words += ["on trial: not counted in the verdict"] if is_on_trial(rule, record) else []
    return " · ".join(words)


def _waiver(waiver: WaiverRecord) -> Element:
    return element(
        "p",
        element("b", f"Waived until {waiver.until}: "),
        f"{waiver.reason} ",
        link(waiver.link, waiver.link),
        class_="waiver",
    )


def _check(check: CheckRecord, rule: RuleRecord) -> Element:
    outcome = weighed(check, rule)
    words = "" if outcome is Outcome.PASSED else label(outcome)
    took = f"{check.elapsed_s:.2f} s"
    remarks = [one for one in (words, took, "stochastic" if check.stochastic else "") if one]
    return element(
        "li",
        icon(outcome.value),
        element(
            "div",
            element(
                "p", check.title, " ", element("small", " · ".join(remarks)), class_="check-title"
            ),
            element("p", *sentence(check.message), class_="message") if check.message else None,
            _evidence(check),
            class_="check-body",
        ),
        class_=f"check o-{outcome.value}",
    )


def _evidence(check: CheckRecord) -> Element | None:
    parts: list[Child] = []
    pair = (("Expected", check.expected, "expected"), ("Came", check.got, "got"))
    sides = [
        element("div", element("dt", name), element("dd", text), class_=class_)
        for name, text, class_ in pair
        if text
    ]
    if sides:
        parts.append(element("dl", *sides, class_="sides"))
    if check.sequence:
        parts.append(element("p", "Shortest sequence that shows it", class_="caption"))
        parts.append(element("ol", *map(_step, check.sequence), class_="sequence"))
    return element("div", *parts, class_="evidence") if parts else None


def _step(line: str) -> Element:
    """Return a call as code, or a remark on omitted calls as text."""
    code = element("code", line)
    return (
        element("li", code, value="0", class_="before") if line[:1] == "(" else element("li", code)
    )


def _reproduction(record: Record, rule: RuleRecord) -> Element | None:
    """Yield the command that reproduces the outcome, if one is known."""
    command = reproduction(record, rule)
    if not command or rule.outcome not in (*MUST_ACT, Outcome.WAIVED):
        return None
    return element(
        "div",
        element("p", "How to reproduce", class_="caption"),
        element("pre", element("code", command)),
    )

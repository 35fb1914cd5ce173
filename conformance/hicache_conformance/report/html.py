"""`report.html`: one self-contained page that shows a run to people."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from string import Template
from typing import TYPE_CHECKING

from hicache_conformance.report.markup import icon, prose, sentence
from hicache_conformance.report.page_rules import consequence_words, pill, rules_section
from hicache_conformance.report.wording import (
    MUST_ACT,
    SHOWN_ORDER,
    counted,
    headline,
    label,
    limits,
    meaning,
    remedies,
    tone,
)
from hicache_conformance.run.outcomes import Outcome
from hicache_storage.markup import element, link, printable, table, text_of

if TYPE_CHECKING:
    import datetime as dt
    from xml.etree.ElementTree import Element

    from hicache_conformance.report.record import Record, RuleRecord
    from hicache_storage.markup import Child

_SCRIPT = """
const open = () => {
  const one = document.getElementById(location.hash.slice(1));
  if (one instanceof HTMLDetailsElement) one.open = true;
};
addEventListener("hashchange", open);
open();
"""
"""A script that opens a rule when a link leads to it."""


def html_report(record: Record) -> str:
    """Return the whole page. It loads nothing, and its policy forbids browsers to load anything."""
    sections = [part for part in _sections(record) if part is not None]
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    name = printable(record.subject.name)
    template = resources.files("hicache_conformance.report").joinpath("report.html.in")
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(f"{name} {headline(record)}: conformance report"),
        script=_SCRIPT,
        script_hash=f"sha256-{digest}",
        verdict=tone(record),
        hero=text_of([_hero(record)]),
        contents=text_of([_contents(sections)]),
        sections=text_of(sections),
        footer=text_of(_footer(record)),
    )


def _sections(record: Record) -> list[Element | None]:
    return [
        _findings(record),
        _circumstances(record),
        _capabilities(record),
        rules_section(record) if record.rules else None,
        _waivers(record),
        _not_verified(record),
        _figures(record),
        _again(record),
    ]


def _section(name: str, title: str, *children: Child, intro: str = "") -> Element:
    heading = element("h2", title, id=f"{name}-title")
    lead = element("p", intro, class_="intro") if intro else None
    return element("section", heading, lead, *children, id=name, aria_labelledby=f"{name}-title")


def _table_section(
    name: str, intro: str, heads: tuple[str, ...], rows: list[tuple[Child, ...]]
) -> Element | None:
    """Return a section with a table, or None if the table would have no row."""
    return (
        _section(name, name.capitalize(), table(heads, rows, name), intro=intro) if rows else None
    )


def _contents(sections: list[Element]) -> Element:
    items = (
        element("li", link(section[0].text or "", f"#{section.get('id')}")) for section in sections
    )
    return element("nav", element("ul", *items), aria_label="Contents")


def _hero(record: Record) -> Element:
    run = record.run
    return element(
        "div",
        element(
            "p",
            f"Conformance report · HiCache storage contract, rules {run.spec}",
            class_="eyebrow",
        ),
        element(
            "div",
            icon(tone(record)),
            element("h1", f"{record.subject.name} {headline(record)}"),
            class_="headline",
        ),
        element("p", meaning(record), class_="lead"),
        *_tally(record),
        *(element("p", note, class_="note") for note in limits(record)),
        class_="wrap",
    )


def _tally(record: Record) -> list[Element]:
    """Return how many rules have each outcome, as a bar and in words."""
    count = record.counts()
    used = [one for one in SHOWN_ORDER if count[one]]
    if not used:
        return []
    parts = (
        element("span", class_=f"part o-{one.value}", style=f"flex-grow:{count[one]}")
        for one in used
    )
    words = (
        element(
            "li",
            icon(one.value),
            element("strong", str(count[one])),
            f" {label(one)}",
            class_=f"o-{one.value}",
        )
        for one in used
    )
    return [
        element("div", *parts, class_="bar", aria_hidden="true"),
        element("ul", *words, class_="tally", aria_label="Rules by outcome"),
    ]


def _findings(record: Record) -> Element | None:
    acted = [rule for one in MUST_ACT for rule in record.rules if rule.outcome is one]
    waived = [rule for rule in record.rules if rule.outcome is Outcome.WAIVED]
    shown = {rule.id for rule in (*acted, *waived)}
    others = [reason for reason in record.reasons if reason.partition(" ")[0] not in shown]
    if not (acted or waived or others):
        return None
    items = [_finding(rule) for rule in (*acted, *waived)]
    items += [
        element("li", element("p", *sentence(reason)), class_="finding o-error")
        for reason in others
    ]
    title = "What was found" if acted or waived else "Why"
    return _section("findings", title, element("ul", *items, class_="findings"))


def _finding(rule: RuleRecord) -> Element:
    bad = {Outcome.WAIVED: (Outcome.FAILED,)}.get(rule.outcome, MUST_ACT)
    seen = [check.message for check in rule.checks if check.outcome in bad and check.message]
    more = f" ({counted(len(seen) - 1, 'more finding')} below)" if len(seen) > 1 else ""
    return element(
        "li",
        element(
            "h3", link(f"{rule.id} {rule.title}", f"#{rule.id}"), " ", pill(rule.outcome.value)
        ),
        element("p", *sentence(f"{seen[0]}{more}"), class_="seen") if seen else None,
        element("p", consequence_words(rule), *prose(rule.consequence), class_="consequence")
        if rule.consequence
        else None,
        class_=f"finding o-{rule.outcome.value}",
    )


def _circumstances(record: Record) -> Element:
    run, subject = record.run, record.subject
    started = element(
        "time", _moment(run.started_at), datetime=run.started_at.isoformat(timespec="seconds")
    )
    facts: dict[str, Child] = {
        "Store": element("code", subject.target),
        "Version": subject.version,
        **{topic.capitalize(): fact for topic, fact in subject.facts.items()},
        "Judged on": started,
        "Took": _duration(run.elapsed_s),
        "Seed": str(run.seed),
        "Rules": f"version {run.spec}",
        "Kit": f"version {run.kit}",
        "Ran on": " · ".join(one for one in (f"Python {run.python}", run.platform) if one)
        if run.python
        else run.platform,
    }
    items = [
        element("div", element("dt", name), element("dd", fact))
        for name, fact in facts.items()
        if fact is not None and fact != ""
    ]
    return _section("run", "The run", element("dl", *items, class_="facts"))


def _moment(moment: dt.datetime) -> str:
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".strip()


def _duration(elapsed_s: float) -> str:
    minutes, seconds = divmod(round(elapsed_s), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{elapsed_s:.1f} s"


def _capabilities(record: Record) -> Element | None:
    rows: list[tuple[Child, ...]] = [
        (
            element("span", f"{label(one.name)} ", _rule_links(record, one.rules)),
            one.claimed,
            element("span", pill(one.outcome), f" {one.note}" if one.note else ""),
        )
        for one in record.subject.capabilities
    ]
    intro = "What the store claims, and what the tests of these claims showed."
    shown = table(("Capability", "Claimed", "Outcome"), rows, "claims")
    return _section("capabilities", "Capabilities", shown, intro=intro) if rows else None


def _rule_links(record: Record, rules: tuple[str, ...]) -> Element | None:
    """Yield links to the rules about a claim. A rule that did not run gets no link."""
    if not rules:
        return None
    shown = {rule.id for rule in record.rules}
    links = (link(rule, f"#{rule}" if rule in shown else "") for rule in rules)
    return element("small", *(child for one in links for child in (one, " ")), class_="links")


def _waivers(record: Record) -> Element | None:
    rows: list[tuple[Child, ...]] = [
        (
            link(rule.id, f"#{rule.id}"),
            element(
                "span",
                f"{rule.waiver.reason} ",
                link(_host(rule.waiver.link), rule.waiver.link),
            ),
            element("span", rule.waiver.until, class_="date"),
        )
        for rule in record.rules
        if rule.waiver is not None
    ]
    intro = "Known violations that are accepted until a date. Waived rules still ran."
    return _table_section("waivers", intro, ("Rule", "Reason", "Until"), rows)


def _host(address: str) -> str:
    return address.partition("://")[2] or address


def _not_verified(record: Record) -> Element | None:
    items = [
        _gap(rule)
        for rule in record.rules
        if any(check.outcome is Outcome.NOT_VERIFIED for check in rule.checks) or not rule.checks
    ]
    if not items:
        return None
    intro = "This run did not test these rules. Each entry says what would test it."
    return _section(
        "not-verified", "Not verified", element("ul", *items, class_="gaps"), intro=intro
    )


def _gap(rule: RuleRecord) -> Element:
    reasons = dict.fromkeys(
        check.message for check in rule.checks if check.outcome is Outcome.NOT_VERIFIED
    )
    why = "; ".join(reasons).rstrip(".") or "no check of it ran"
    return element(
        "li",
        element("p", link(f"{rule.id} {rule.title}", f"#{rule.id}")),
        element("p", *sentence(f"{why}."), class_="seen"),
        *(element("p", *prose(remedy), class_="remedy") for remedy in remedies(rule)),
    )


def _figures(record: Record) -> Element | None:
    rows: list[tuple[Child, ...]] = [
        (name, value, link(rule.id, f"#{rule.id}"))
        for rule in record.rules
        for check in rule.checks
        for name, value in check.evidence.items()
    ]
    intro = "Counted or measured during the checks, for information: no verdict depends on them."
    return _table_section("figures", intro, ("Figure", "Value", "Rule"), rows)


def _again(record: Record) -> Element:
    config = json.dumps(record.subject.config, indent=2, ensure_ascii=False)
    command = record.run.command
    hidden = "***" in command + config
    return _section(
        "again",
        "Run it again",
        element("pre", element("code", command)) if command else None,
        element(
            "details",
            element("summary", "The configuration that it was judged with"),
            element("pre", element("code", config)),
            class_="config",
        )
        if record.subject.config
        else None,
        element("p", "*** stands for a secret that was taken out.", class_="note")
        if hidden
        else None,
        element("p", "The command that started this run is not known.", class_="note")
        if not command
        else None,
    )


def _footer(record: Record) -> list[Element]:
    return [
        element(
            "p",
            f"Made by hicache-conformance {record.run.kit} with version {record.run.spec} of the"
            " rules. It shows what was seen in this run. Next to it are result.json, which holds"
            " everything that is shown here, junit.xml and badge.json.",
        )
    ]

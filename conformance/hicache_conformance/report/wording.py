"""The sentences about a record that all forms of the report share."""

from __future__ import annotations

import re
import shlex
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from hicache_conformance.run.outcomes import Outcome, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.report.record import CheckRecord, Record, RuleRecord

MUST_ACT = (Outcome.FAILED, Outcome.ERROR, Outcome.UNKNOWN)
"""The outcomes that need attention."""
SHOWN_ORDER = (
    Outcome.PASSED,
    Outcome.PARTLY,
    Outcome.FAILED,
    Outcome.ERROR,
    Outcome.UNKNOWN,
    Outcome.WAIVED,
    Outcome.NOT_VERIFIED,
    Outcome.NOT_DECLARED,
)
REMEDIES = {
    "peek": "Open the back door `peek(space, page_hash)` in a test class of the store: it returns"
    " the bytes that the store keeps.",
    "tamper": "Open the back door `tamper(space, page_hash, data)` in a test class of the store: it"
    " replaces or removes a page behind the store's back.",
    "server": "Open the back door `server()` in a test class of the store: a real server that the kit"
    " may stop, start, pause and resume.",
    "stall": "Open the back door `stall()` in a test class of the store: inside it, another process"
    " holds a lock that a call needs.",
    "small_config": "Open the back door `small_config(scratch, capacity_nbytes)` in a test class of the"
    " store: the config of a store that is soon full.",
    "an address in the config": "Give the store a config with the address of a server, so that the"
    " kit can put a proxy in front of it.",
}
"""The advice for each missing need of a rule."""

_NOT_WHOLE = {Outcome.PARTLY: "tried in part", Outcome.NOT_VERIFIED: "not tried"}
_GAPS = {Outcome.WAIVED: "waived", Outcome.UNKNOWN: "undecided"}
_PROVISIONAL = "provisional"
_BACK_DOOR = re.compile(r"back door `([^`]+)`")


def label(outcome: str) -> str:
    """Return an outcome in words, such as `not verified`."""
    return outcome.replace("_", " ")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rule` or `3 rules`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def families(rules: Sequence[RuleRecord]) -> dict[str, list[RuleRecord]]:
    """Return the rules by family, in the order of the record."""
    found: defaultdict[str, list[RuleRecord]] = defaultdict(list)
    for rule in rules:
        found[rule.family].append(rule)
    return dict(found)


def tally(outcomes: Mapping[Outcome, int]) -> str:
    """Return the outcomes in words, such as `31 passed, 2 failed`."""
    return ", ".join(f"{outcomes[one]} {label(one)}" for one in SHOWN_ORDER if outcomes.get(one))


def is_on_trial(rule: RuleRecord, record: Record) -> bool:
    """Return True if the rule does not count in the verdict."""
    return rule.level == _PROVISIONAL and not record.run.strict


def weighed(check: CheckRecord, rule: RuleRecord) -> Outcome:
    """Return the outcome that counts for a check: `waived` if a valid waiver covers its failure."""
    waived = rule.outcome is Outcome.WAIVED and check.outcome is Outcome.FAILED
    return Outcome.WAIVED if waived else check.outcome


def verdict_words(verdict: Verdict, outcomes: Mapping[Outcome, int]) -> str:
    """Return the verdict with its gaps: `conformant, 2 rules tried in part, 1 rule not tried`."""
    gaps = [
        f"{counted(outcomes[one], 'rule')} {words}"
        for one, words in _NOT_WHOLE.items()
        if verdict is Verdict.CONFORMANT and outcomes.get(one)
    ]
    return ", ".join([verdict.value, *gaps])


def headline(record: Record) -> str:
    """Return the verdict in the words that follow the name of the store."""
    match record.verdict:
        case Verdict.CONFORMANT if any(record.counts()[one] for one in _NOT_WHOLE):
            return "is conformant, as far as it was tried"
        case Verdict.CONFORMANT:
            return "is conformant"
        case Verdict.PARTIAL if record.is_whole:
            return "is conformant in part"
        case Verdict.PARTIAL | Verdict.INCOMPLETE:
            return "was tried in part"
        case Verdict.FAILED:
            return "is not conformant"
        case Verdict.INCONCLUSIVE:
            return "could not be judged"


def tone(record: Record) -> str:
    """Return the verdict that gives the report its color. Green stands for a verdict without a gap."""
    whole = verdict_words(record.verdict, record.counts()) == record.verdict.value
    return record.verdict.value if whole else Verdict.PARTIAL.value


def meaning(record: Record) -> str:
    """Return what the verdict means, in a sentence."""
    count = Counter(rule.outcome for rule in record.rules if not is_on_trial(rule, record))
    part = count[Outcome.PARTLY]
    judged = sum(count.values()) - count[Outcome.NOT_DECLARED] - count[Outcome.NOT_VERIFIED]
    open_rules = count[Outcome.NOT_VERIFIED]
    rest = f"; {open_rules} more could not be verified" if open_rules else ""
    if record.verdict is not Verdict.INCOMPLETE and part:
        rest = f"; {part} of them {'was' if part == 1 else 'were'} tried in part{rest}"
    of_rules = f"of the {counted(judged, 'rule')} that could be tested"
    match record.verdict:
        case Verdict.INCOMPLETE:
            run = record.run
            return (
                f"Of {counted(run.ran + run.left_out, 'check')}, {run.ran:,} ran and none failed: too"
                " few for a verdict."
            )
        case Verdict.CONFORMANT if judged == 1:
            return f"The one rule that could be tested holds{rest}."
        case Verdict.CONFORMANT:
            return f"All {judged} rules that could be tested hold{rest}."
        case Verdict.FAILED:
            return f"The store breaks {count[Outcome.FAILED]} {of_rules}{rest}."
        case Verdict.PARTIAL:
            return _meaning_of_partial(count, judged, rest)
        case Verdict.INCONCLUSIVE:
            return (
                "This run decides nothing about the store: too few checks ran, or the tools failed."
            )


def _meaning_of_partial(count: Mapping[Outcome, int], judged: int, rest: str) -> str:
    gaps = [
        f"{count[one]} {'is' if count[one] == 1 else 'are'} {word}"
        for one, word in _GAPS.items()
        if count[one]
    ]
    if gaps:
        tested = f"of the {counted(judged, 'rule')} that could be tested"
        return f"Not every rule is known to hold: {tested}, {' and '.join(gaps)}{rest}."
    part, untried = count[Outcome.PARTLY], count[Outcome.NOT_VERIFIED]
    left = [f"{untried} could not be verified"] if untried or not part else []
    left += [f"{part} {'was' if part == 1 else 'were'} tried in part"] if part else []
    return (
        f"All {judged} rules that could be tested hold, but {' and '.join(left)}, and strict mode does"
        " not accept that."
    )


def limits(record: Record) -> list[str]:
    """Return what the verdict does not cover: checks that did not run, or may pass by luck."""
    run = record.run
    notes: list[str] = []
    if run.selection:
        patterns = ", ".join(run.selection)
        notes.append(f"Only the rules {patterns} were run: the verdict is about these alone.")
    if run.quick:
        notes.append("A quick run: checks that take long were left out.")
    if run.left_out:
        notes.append(_left_out_words(record))
    if run.strict:
        notes.append("A strict run: a rule that could not be verified counts against the store.")
    trial = sum(is_on_trial(rule, record) for rule in record.rules)
    if trial:
        notes.append(f"{counted(trial, 'rule')} on trial are shown, and not counted.")
    lucky = sum(one.stochastic for rule in record.rules for one in rule.checks)
    if lucky:
        passes = f"a pass of {'this one' if lucky == 1 else 'these'}"
        notes.append(f"{counted(lucky, 'stochastic check')}: {passes} means not caught this time.")
    return notes


def _left_out_words(record: Record) -> str:
    """Return how many checks did not run, and which rules of the record lack checks."""
    if not record.run.ran:
        return f"None of the {counted(record.run.left_out, 'check')} ran."
    rules = [rule.id for rule in record.rules if rule.left_out]
    elsewhere = record.run.left_out - sum(len(rule.left_out) for rule in record.rules)
    places = [f"of {', '.join(rules)}"] if rules else []
    places += [f"{elsewhere} of rules that are not in this report"] if elsewhere else []
    total = record.run.ran + record.run.left_out
    return f"{record.run.left_out} of {counted(total, 'check')} did not run: {', '.join(places)}."


def remedies(rule: RuleRecord) -> list[str]:
    """Return advice for the checks of a rule that could not run."""
    missing = [one.message for one in rule.checks if one.outcome is Outcome.NOT_VERIFIED]
    doors = [door for message in missing for door in _BACK_DOOR.findall(message)]
    needs = dict.fromkeys([*doors, *(() if doors else rule.needs)])
    return [REMEDIES[need] for need in needs if need in REMEDIES]


def reproduction(record: Record, rule: RuleRecord) -> str:
    """Return the command that runs this rule alone again, or "" if none is known."""
    try:
        words = shlex.split(record.run.command)
    except ValueError:  # the removal of a secret also removed a quote
        return record.run.command
    if not words:
        return ""
    if words[0] == "pytest":
        narrowed = [*_without(words, ("-k", "--hicache-report")), "-k", _test_words(rule)]
    else:
        narrowed = [*_without(words, ("--rules", "--report")), "--rules", rule.id]
    return shlex.join(narrowed)


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return a command line without these flags and their values."""
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word in flags:
            next(left, None)
        elif not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
    return kept


def _test_words(rule: RuleRecord) -> str:
    return rule.id.lower().replace("-", "_")

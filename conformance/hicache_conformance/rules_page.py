"""`docs/rules.md`, which is generated from the rules, the checks and the mutants."""

from __future__ import annotations

from collections import defaultdict

from hicache_conformance.checks import Check, all_checks
from hicache_conformance.rules import CLAIMS, FAMILIES, RULES, SPEC, Rule
from hicache_conformance.selftest.mutants import Mutant, all_mutants

_HEAD = f"""# The rules

These are the rules of [the storage contract](contract.md), version {SPEC}, with the checks that test
them. To run them on your store, read the [guide for backend authors](backend-author-guide.md). This
page is generated: `hicache-conformance rules > docs/rules.md`.

* **Level**: a *core* rule holds for every store. An *extended* rule is about something that a store
  claims, or needs more than the interface to be seen; it is a must as well. A *provisional* rule is on
  trial, and does not count in the verdict without `--strict`.
* **Needs**: a rule about a claim that a store does not make is `not_declared`. A rule whose back door
  is missing is `not_verified`, or `partly` if some of its checks can run without it; neither is passed.
* **Checks** are the tests that the kit runs. Those marked *stochastic* may pass by luck.
* **Wrong stores** ("mutants") test the kit: each must fail by this rule (`hicache-conformance
  selftest`). [The kill matrix](kill-matrix.md) has their whole table.
"""


def rules_page() -> str:
    """Return the whole page, in Markdown."""
    checks: defaultdict[str, list[Check]] = defaultdict(list)
    for check in all_checks():
        checks[check.rule.id].append(check)
    mutants: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in all_mutants():
        for rule_id in mutant.rule_ids:
            mutants[rule_id].append(mutant)
    parts = [_HEAD]
    for family in FAMILIES.values():
        parts.append(f"\n## {family}\n")
        parts += [
            _section(rule, checks[rule.id], mutants[rule.id])
            for rule in RULES.values()
            if rule.family == family
        ]
    return "".join(parts)


def _section(rule: Rule, checks: list[Check], mutants: list[Mutant]) -> str:
    needs = [f"{'claim' if need in CLAIMS else 'back door'}: {need}" for need in rule.needs]
    facts = [f"**Level** {rule.level}", f"**since** {rule.since}"]
    facts += [f"**needs** {', '.join(needs)}"] if needs else []
    lines = [f"\n### {rule.id} · {rule.title}\n", rule.statement]
    lines += ["", f"*Without it:* {rule.consequence}", "", " · ".join(facts), "", "Checks:", ""]
    lines += [f"* `{check.run.__name__}`: {check.title}{_remarks(check)}" for check in checks]
    lines += ["", "<details><summary>Wrong stores that it catches</summary>", ""]
    lines += [f"* `{mutant.name}`: {mutant.fault}" for mutant in mutants]
    lines += ["", "</details>", ""]
    return "\n".join(lines)


def _remarks(check: Check) -> str:
    words = [f"needs {need}" for need in check.needs]
    words += ["stochastic"] if check.stochastic else []
    words += [] if check.quick else ["not with `--quick`"]
    return f" *({'; '.join(words)})*" if words else ""

"""Prints the progress and the result of a run on the terminal."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Self

from rich import box
from rich.console import Console, Group
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from hicache_conformance.report.wording import (
    MUST_ACT,
    SHOWN_ORDER,
    counted,
    families,
    label,
    limits,
    meaning,
    reproduction,
    tally,
    tone,
    verdict_words,
    weighed,
)
from hicache_conformance.rules import RULES
from hicache_conformance.run.outcomes import Outcome, Verdict
from hicache_storage.markup import printable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from rich.console import RenderableType

    from hicache_conformance.report.record import CheckRecord, Record, RuleRecord

_STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "red",
    Outcome.ERROR: "magenta",
    Outcome.UNKNOWN: "yellow",
    Outcome.PARTLY: "yellow",
    Outcome.WAIVED: "blue",
}
_VERDICT_STYLES = {
    Verdict.CONFORMANT: "bold green",
    Verdict.INCOMPLETE: "bold blue",
    Verdict.PARTIAL: "bold yellow",
    Verdict.FAILED: "bold red",
    Verdict.INCONCLUSIVE: "bold magenta",
}


def print_summary(record: Record, console: Console | None = None) -> None:
    """Print the verdict, the rules by family, and each rule that needs attention."""
    acted = [rule for rule in record.rules if rule.outcome in MUST_ACT]
    show(
        console,
        *(_rule_block(record, rule) for rule in acted),
        *((_family_table(record), "") if record.rules else ()),
        *_not_verified(record),
        *_verdict_lines(record),
    )


def show(console: Console | None, *parts: RenderableType) -> None:
    """Print `parts`. If the output is not a terminal, drop the blanks that rich adds to line ends."""
    out = console or Console(highlight=False)
    if out.is_terminal:
        out.print(*parts, sep="\n")
        return
    with out.capture() as captured:
        out.print(*parts, sep="\n")
    out.file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))


def _verdict_lines(record: Record) -> Iterator[RenderableType]:
    yield Text.assemble(
        (
            verdict_words(record.verdict, record.counts()).upper(),
            _VERDICT_STYLES[Verdict(tone(record))],
        ),
        f"  {printable(record.subject.name)}: {meaning(record)}",
    )
    shown = {rule.id for rule in record.rules if rule.outcome in MUST_ACT}
    told = [reason for reason in record.reasons if reason.partition(" ")[0] not in shown]
    for line in [*told, *limits(record)]:
        yield _indented(Text(printable(line), style="dim" if line not in told else ""))
    run = record.run
    facts = f"rules {run.spec}, kit {run.kit}, seed {run.seed}, {run.elapsed_s:.1f} s"
    yield _indented(Text(facts, style="dim"))
    for topic, fact in record.subject.facts.items():
        yield _indented(Text(printable(f"{topic}: {fact}"), style="dim"))


def _indented(part: RenderableType) -> Padding:
    return Padding(part, (0, 0, 0, 2))


def _family_table(record: Record) -> Table:
    used = [one for one in SHOWN_ORDER if record.counts()[one]]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("rules", no_wrap=True)
    for outcome in used:
        table.add_column(label(outcome).replace(" ", "\n"), justify="right")
    for family, rules in families(record.rules).items():
        count = Counter(rule.outcome for rule in rules)
        cells = (
            Text(str(count[one]), style=_STYLES.get(one, "dim")) if count[one] else Text("")
            for one in used
        )
        table.add_row(Text(family), *cells)
    return table


def _not_verified(record: Record) -> Iterator[Text]:
    """Yield one line for each reason, because many rules lack the same back door."""
    by_reason: dict[str, list[str]] = {}
    for rule in record.rules:
        for check in rule.checks:
            if check.outcome is Outcome.NOT_VERIFIED:
                rules = by_reason.setdefault(check.message, [])
                rules += [rule.id] * (rule.id not in rules)
    for reason, rules in by_reason.items():
        yield Text(f"not verified, {printable(reason)}: {', '.join(rules)}", style="dim")
    if by_reason:
        yield Text("")


def _rule_block(record: Record, rule: RuleRecord) -> RenderableType:
    title = Text.assemble(
        (label(rule.outcome).upper(), f"bold {_STYLES.get(rule.outcome, '')}".strip()),
        ("  ", ""),
        (f"{rule.id} {printable(rule.title)}", "bold"),
    )
    lines = [Text(printable(rule.consequence), style="italic")] if rule.consequence else []
    checks = [check for check in rule.checks if weighed(check, rule) in MUST_ACT]
    blocks: list[RenderableType] = [_check_block(check) for check in checks]
    command = reproduction(record, rule)
    again = [_field("again", command)] if command else []
    return Group(title, _indented(Group(*lines, *blocks, *again, "")))


def _check_block(check: CheckRecord) -> Table:
    """Return one check in two columns: the label of a line, and its text."""
    rows = [("check", check.title), ("problem", check.message)]
    rows += [("expected", check.expected), ("came", check.got)]
    table = _fields()
    for name, text in rows:
        if text:
            table.add_row(Text(name, style="dim"), Text(printable(text)))
    if check.sequence:
        steps = Text("\n".join(map(printable, check.sequence)))
        table.add_row(Text("sequence", style="dim"), steps)
    return table


def _fields() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(width=8, no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _field(name: str, text: str) -> Table:
    table = _fields()
    table.add_row(Text(name, style="dim"), Text(printable(text)))
    return table


class Progress:
    """The display of a run's progress: a live line on a terminal, elsewhere a line after each family.

    with Progress(total=len(checks)) as progress:
        progress.advance(record)
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._family = ""
        self._count: Counter[Outcome] = Counter()
        self._failures = 0
        self._bar = Bar(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failures]}", style="red", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total, failures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._tell_family()

    def advance(self, check: CheckRecord) -> None:
        """Count one more check as done."""
        rule = RULES.get(check.name.partition(":")[0])
        family = rule.family if rule else "Other"
        if family != self._family:
            self._tell_family()
            self._family = family
        self._count[check.outcome] += 1
        self._failures += check.outcome is Outcome.FAILED
        failures = f"{self._failures} failed" if self._failures else ""
        description = f"{family} {rule.id}" if rule else family
        self._bar.update(self._task, advance=1, description=description, failures=failures)

    def _tell_family(self) -> None:
        if self._count and not self._console.is_terminal:
            checks = counted(self._count.total(), "check")
            self._console.print(
                f"{self._family}: {checks}: {tally(self._count)}", markup=False, soft_wrap=True
            )
        self._count.clear()

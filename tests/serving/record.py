"""Facts that a run saw, kept as JSON, and `docs/serving.md`, which is written from them.

Each scenario notes what it saw, and goes on to assert it:

    note("vLLM 0.32.0", "redis", "the server is stopped", comparison, stored_tokens=2816)

`python -m serving.record` writes what was noted into the tables of `docs/serving.md`. If a scenario runs
again, its new row takes the place of the old one. Rows of the same version of the engine that nobody
noted stay, so you can run a few scenarios alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from serving.answers import Comparison

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "serving.md"
NOTES = ROOT / "artifacts" / "serving"
_COUNTS = ("store", "event", "answers", "wrong", "slowest, s", "cached tokens")
TITLES = (*_COUNTS, "what else")
FAULTS = {
    "slowest_in_calm_s": "slowest in calm, s",
    "loads_again_after_s": "loads again after, s",
}
"""Facts that a note of a fault has, each with its column. Such notes have a table of their own."""


@dataclass(frozen=True)
class Note:
    """One event over one store, as an engine saw it."""

    engine: str
    store: str
    event: str
    answers: int
    failed: int
    different: int
    slowest_s: float
    cached_tokens: int
    facts: dict[str, float | str] = field(default_factory=dict[str, float | str])

    def row(self) -> Sequence[str]:
        """Return the cells of the note's row in the table of its engine."""
        wrong = f"{self.different:,}" + (f" and {self.failed:,} failed" if self.failed else "")
        counts = (f"{self.answers:,}", wrong, f"{self.slowest_s:.2f}", f"{self.cached_tokens:,}")
        own = (self.store, self.event, *counts)
        if self.facts.keys() >= FAULTS.keys():
            return (*own, *(_value(self.facts[name]) for name in FAULTS))
        return (*own, ", ".join(_fact(name, value) for name, value in self.facts.items()))


def _value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _fact(name: str, value: float | str) -> str:
    """Return a fact as a table shows it, such as "ended after 1.2 s"."""
    words = name.replace("_", " ")
    seconds = " s" if name.endswith("_s") else ""
    return f"{words.removesuffix(' s')} {_value(value)}{seconds}"


def note(engine: str, store: str, event: str, seen: Comparison, **facts: float | str) -> None:
    """Keep what an event showed. Processes may note at the same time."""
    made = Note(engine=engine, store=store, event=event, facts=facts, **asdict(seen))
    NOTES.mkdir(parents=True, exist_ok=True)
    with _path(engine).open("a", encoding="utf-8") as notes:
        notes.write(json.dumps(asdict(made)) + "\n")


def notes() -> list[Note]:
    """Return the last note of each event over each store, sorted by engine."""
    lines = (
        line
        for path in sorted(NOTES.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    )
    last: dict[tuple[str, str, str], Note] = {}
    for line in lines:
        made = Note(**json.loads(line))
        last[made.engine, made.store, made.event] = made
    return list(last.values())


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def replace_part(text: str, name: str, part: str) -> str:
    """Replace what stands in a page between the comments `NAME` and `end of NAME`."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(opening)
    _, found, after = rest.partition(closing)
    if not found:
        message = f"the page has no {opening.strip()} with a {closing} after it"
        raise ValueError(message)
    return f"{before}{opening}\n{part}\n{closing}{after}"


def main() -> None:
    """Write the tables of the engines that have notes into the page."""
    PAGE.write_text(with_notes(PAGE.read_text(encoding="utf-8"), notes()), encoding="utf-8")


def with_notes(text: str, noted: Iterable[Note]) -> str:
    """Return the page with these notes."""
    by_engine: dict[str, list[Note]] = {}
    for each in noted:
        by_engine.setdefault(each.engine, []).append(each)
    for engine, seen in by_engine.items():
        part = f"events {engine.split()[0]}"
        rows = {(row[0], row[1]): row for row in _rows_of(text, part, engine)}
        rows |= {(each.store, each.event): each.row() for each in seen}
        tables = (
            markdown(titles, sorted(own, key=lambda row: row[0]))
            for titles in (TITLES, (*_COUNTS, *FAULTS.values()))
            if (own := [row for row in rows.values() if len(row) == len(titles)])
        )
        text = replace_part(text, part, "\n".join((f"{engine}:\n", *tables)))
    return text


def _rows_of(text: str, part: str, engine: str) -> Iterator[Sequence[str]]:
    """Yield the rows of the tables of a part of the page, if they are of this version of the engine."""
    tables = text.partition(f"<!-- {part} -->")[2].partition(f"<!-- end of {part} -->")[0].strip()
    if tables.startswith(f"{engine}:\n"):
        for line in tables.splitlines():
            if line.startswith("| ") and not line.startswith(("| store |", "| --- |")):
                yield [cell.strip() for cell in line[1:].removesuffix("|").split("|")]


def _path(engine: str) -> Path:
    return NOTES / f"{engine.split(maxsplit=1)[0].lower()}.jsonl"


if __name__ == "__main__":
    main()

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
TITLES = (
    "store",
    "event",
    "answers",
    "failed",
    "different",
    "slowest",
    "cached tokens",
    "what else",
)


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
        what_else = ", ".join(_fact(name, value) for name, value in self.facts.items())
        counts = (f"{count:,}" for count in (self.answers, self.failed, self.different))
        cached = f"{self.cached_tokens:,}"
        return (self.store, self.event, *counts, f"{self.slowest_s:.2f} s", cached, what_else)


def _fact(name: str, value: float | str) -> str:
    """Return a fact as a table shows it, such as "loads again after 1.2 s"."""
    if isinstance(value, str):
        return value
    words = name.replace("_", " ")
    return (
        f"{words.removesuffix(' s')} {value:,} s" if name.endswith("_s") else f"{words} {value:,}"
    )


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
        table = markdown(TITLES, sorted(rows.values(), key=lambda row: row[0]))
        text = replace_part(text, part, f"{engine}:\n\n{table}")
    return text


def _rows_of(text: str, part: str, engine: str) -> Iterator[Sequence[str]]:
    """Yield the rows of a table of the page, if they are of this version of the engine."""
    table = text.partition(f"<!-- {part} -->")[2].partition(f"<!-- end of {part} -->")[0]
    opening, *lines = table.strip().splitlines()
    if opening == f"{engine}:":
        for line in lines[3:]:  # after an empty line and the head of the table
            yield [cell.strip() for cell in line[1:].removesuffix("|").split("|")]


def _path(engine: str) -> Path:
    return NOTES / f"{engine.split(maxsplit=1)[0].lower()}.jsonl"


if __name__ == "__main__":
    main()

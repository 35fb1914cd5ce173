"""Writes the tables of docs/field-report.md: `make truth-matrix`.

They are made from the records of the kit's runs (`docs/field/*.json`), from what the reproducers saw
(`docs/field/reproduced/*.json`), from the events of real servers (`docs/serving.md`) and from
`unjudged.toml`.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_conformance.report.matrix import matrix
from hicache_conformance.report.summary import Summary
from hicache_conformance.run.outcomes import Outcome

from hicache_storage.markup import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "field-report.md"
RECORDS = ROOT / "docs" / "field"
SERVING = ROOT / "docs" / "serving.md"
EVENTS = {
    "restart": "restart",
    "damage": "a bit of every page is flipped",
    "kill": "its server is killed, and comes back empty",
    "hang": "its server is stopped, and goes on",
    "full": "it is full, and has room again",
}
"""The columns of the table of events, each with its event in docs/serving.md."""
_OWN_RESTARTED = re.compile(r"(\S+) \((.*'s)\), restarted")
_PAGES = {"lmcache": "lmcache", "vllm-fs": "vllm"}
"""Pages that have another name than the record: by the start of the record's name."""


def page(text: str) -> str:
    """Return the page with its tables made anew."""
    records = {path.stem: Summary.read(path) for path in sorted(RECORDS.glob("*.json"))}
    parts = {
        "matrix": rules(list(records.values())),
        "red cells": red_cells(records),
        "events": events(SERVING.read_text(encoding="utf-8")),
        "unjudged": unjudged(),
    }
    for name, part in parts.items():
        text = _replaced(text, name, part)
    return text


def rules(records: Sequence[Summary]) -> str:
    """Return the outcome of each rule for each store, and how many checks ran.

    Rules that no store claims, or could be asked about, are named below the table.
    """
    head, *lines = re.split(r"(?m)^(?=\| KV-)", matrix(records))
    ran = [str(sum(sum(rule.checks.values()) for rule in one.rules)) for one in records]
    unasked = [line for line in lines if {*_cells(line)[2:]} <= {"", "-", "not asked"}]
    asked = "".join(line for line in lines if line not in unasked)
    table = f"{head}|  | checks | {' | '.join(ran)} |\n{asked}"
    table = re.sub(r"\*\*broken\*\* (\d+/\d+)", r"**\1**", table.replace("kept in part", "partly"))
    return f"{table}\nNo store claims these rules, or could be asked: {_listed(unasked)}.\n"


def red_cells(records: Mapping[str, Summary]) -> str:
    """Return a section for each store: its versions, its command, and what caused broken rules."""
    return "\n".join(_section(name, record) for name, record in records.items())


def events(serving: str) -> str:
    """Return what happened to each store under real engines, from the tables of docs/serving.md."""
    seen: dict[tuple[str, str], dict[str, str]] = {}
    for engine, cells in _rows(serving, "events"):
        store, event, *counts = cells
        for column, known in EVENTS.items():
            if event == known:
                seen.setdefault((engine, store), {})[column] = _event(counts)
    for engine, (phase, first_token, *_, wrong) in _rows(serving, "demo"):
        if demo := _OWN_RESTARTED.fullmatch(phase):
            cell = _seen(first_token.removesuffix(" s"), *wrong.split(" of "))
            seen.setdefault((engine, f"{demo[2]} {demo[1]}"), {}).setdefault("restart", cell)
    own_first = sorted(seen, key=lambda place: ("'s " not in place[1], place))
    rows = [
        [engine, store, *(seen[engine, store].get(column, "") for column in EVENTS)]
        for engine, store in own_first
    ]
    return _table(["engine", "store", *EVENTS], rows)


def _rows(serving: str, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the engine and the cells of each row of the tables between `KIND ENGINE` and its end.

    A table of `KIND ENGINE linker` is not read: it shows the engine's own store a second time.
    """
    engine = ""
    for line in serving.splitlines():
        if opening := re.fullmatch(rf"<!-- {kind} (\S+) -->", line):
            engine = opening[1]
        elif line.startswith("<!-- end"):
            engine = ""
        elif engine and line.startswith(f"{engine} "):
            engine = line.removesuffix(":")  # with its version
        elif engine and line.startswith("| "):
            yield engine, _cells(line)


def unjudged() -> str:
    """Return a row for each store that cannot be judged here."""
    found = tomllib.loads((Path(__file__).parent / "unjudged.toml").read_text(encoding="utf-8"))
    rows = [[one["name"], one["version"], one["why"]] for one in found["store"]]
    return _table(["store", "version", "why not"], rows)


def _section(name: str, record: Summary) -> str:
    seen, version = _reproduced(name)
    broken = [rule.id for rule in record.rules if rule.outcome is Outcome.FAILED]
    shown = {rule for one in seen for rule in one["rules"]}
    by_hand = [rule for rule in broken if rule not in shown]
    rows = [
        [printable(one["text"]).replace("|", "\\|"), ", ".join(rules), f"`{one['program']}.py`"]
        for one in seen
        if (rules := [rule for rule in one["rules"] if rule in broken])
    ]
    facts = [
        record.store.version,
        f"`make field-{name}`: {record.run.elapsed_s / 60:.0f} min, {record.run.started_at:%Y-%m-%d}",
        *([f"programs ran on {version}"] if version not in ("", record.store.version) else []),
    ]
    parts = [f"### {record.store.name}", "; ".join(facts) + "."]
    if rows:
        parts.append(_table(["seen with the store alone", "rules", "program"], rows))
    if by_hand:
        place = next((_PAGES[start] for start in _PAGES if name.startswith(start)), name)
        also = "Also broken, with" if rows else "With"
        parts.append(
            f"{also} causes and steps by hand on [its page](field/{place}.md): {', '.join(by_hand)}."
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _reproduced(name: str) -> tuple[list[Mapping[str, Any]], str]:
    path = RECORDS / "reproduced" / f"{name}.json"
    if not path.exists():
        return [], ""
    record = json.loads(path.read_text(encoding="utf-8"))
    return record["seen"], record["version"]


def _listed(lines: Iterable[str]) -> str:
    return ", ".join(_cells(line)[0] for line in lines)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:].removesuffix("|").split("|")]


def _event(cells: Sequence[str]) -> str:
    answers, wrong_and_failed, slowest = cells[:3]
    wrong = sum(map(int, re.findall(r"\d+", wrong_and_failed.replace(",", ""))))
    return _seen(slowest, f"{wrong:,}", answers)


def _seen(slowest_s: str, wrong: str, answers: str) -> str:
    """Return the cell of an event: its slowest answer in seconds, after the wrong ones, if any."""
    return slowest_s if wrong == "0" else f"**{wrong} of {answers} wrong**, {slowest_s}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _replaced(text: str, name: str, part: str) -> str:
    """Replace what stands between the comments `NAME` and `end of NAME`."""
    opening, closing = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(opening)
    _, found, after = rest.partition(closing)
    if not found:
        raise ValueError(f"{PAGE} has no {opening.strip()} with a {closing} after it")
    return f"{before}{opening}\n{part}\n{closing}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

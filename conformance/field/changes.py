"""Says what a new run of `make field` changed beside the records: `make field-newest`.

    python -m field.changes docs/field artifacts/field

It prints Markdown, for the summary of a workflow, and exits with 1 if anything changed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hicache_conformance.report.summary import Summary
from hicache_conformance.run.outcomes import Outcome


def changes(before: Summary, after: Summary | None) -> list[str]:
    """Return what changed on one store, in a sentence each. `after` is None if there was no run."""
    if after is None:
        return ["it could not be run: see the log"]
    lines: list[str] = []
    if before.store.version != after.store.version:
        lines.append(f"version: {before.store.version}, now {after.store.version}")
    if before.verdict != after.verdict:
        lines.append(f"verdict: {before.verdict.value}, now {after.verdict.value}")
    failed = [set(one.failed_checks) for one in (before, after)]
    lines += [f"fails now: `{name}`" for name in sorted(failed[1] - failed[0])]
    passed = {rule.id for rule in after.rules if rule.outcome is Outcome.PASSED}
    for name in sorted(failed[0] - failed[1]):
        rule_passes = name.partition(":")[0] in passed
        lines.append(f"fails no more: `{name}`" + (", and its rule is kept" if rule_passes else ""))
    return lines


def report(records: Path, runs: Path) -> str:
    """Return the changes of all stores that have a record, or an empty text if there are none."""
    sections: list[str] = []
    for path in sorted(records.glob("*.json")):
        before = Summary.read(path)
        results = sorted((runs / path.stem).glob("*/result.json"))
        found = changes(before, Summary.read(results[0]) if results else None)
        if found:
            items = "".join(f"* {one}\n" for one in found)
            sections.append(f"## {before.store.name}\n\n{items}")
    return "\n".join(sections)


def main(records: Path, runs: Path) -> int:
    """Print the changes, or that there are none. Return 1 if anything changed."""
    text = report(records, runs)
    sys.stdout.write(text or "Nothing changed.\n")
    return 1 if text else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

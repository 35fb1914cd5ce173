"""`badge.json`: the verdict in the endpoint format of shields.io."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hicache_conformance.report.wording import tone, verdict_words
from hicache_conformance.run.outcomes import Verdict

if TYPE_CHECKING:
    from hicache_conformance.report.record import Record

_COLOURS = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.INCOMPLETE: "blue",
    Verdict.PARTIAL: "yellow",
    Verdict.FAILED: "red",
    Verdict.INCONCLUSIVE: "lightgrey",
}


def badge_json(record: Record) -> str:
    """Return the badge. It shows the gaps of the verdict, and how many checks ran if some did not."""
    run = record.run
    parts = ["quick"] * run.quick
    parts += ["some rules only"] * bool(run.selection)
    parts += [f"{run.ran} of {run.ran + run.left_out} checks"] if run.left_out else []
    words = verdict_words(record.verdict, record.counts())
    message = f"{words} ({', '.join([f'rules {run.spec}', *parts])})"
    badge = {
        "schemaVersion": 1,
        "label": "hicache conformance",
        "message": message,
        "color": _COLOURS[Verdict(tone(record))],
    }
    return json.dumps(badge, indent=2) + "\n"

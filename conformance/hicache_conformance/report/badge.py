"""`badge.json`: the verdict in the endpoint format of shields.io."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hicache_conformance.run.outcomes import Verdict

if TYPE_CHECKING:
    from hicache_conformance.report.record import Record

_COLOURS = {
    Verdict.CONFORMANT: "brightgreen",
    Verdict.PARTIAL: "yellow",
    Verdict.FAILED: "red",
    Verdict.INCONCLUSIVE: "lightgrey",
}


def badge_json(record: Record) -> str:
    """Return the badge. It names the selection where only a part of the rules was run."""
    run = record.run
    parts = ["quick"] * run.quick + ["some rules only"] * bool(run.selection)
    message = f"{record.verdict.value} ({', '.join([f'rules {run.spec}', *parts])})"
    badge = {
        "schemaVersion": 1,
        "label": "hicache conformance",
        "message": message,
        "color": _COLOURS[record.verdict],
    }
    return json.dumps(badge, indent=2) + "\n"

"""`hicache explain`: say why requests hit or missed, from the explain log of an engine or a replay."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from hicache_storage.cli.ages import age, format_time
from hicache_storage.cli.escapes import escaped
from hicache_storage.cli.printing import output_console, print_json, print_lines
from hicache_storage.cli.sizes import counted
from hicache_storage.errors import ConfigError
from hicache_storage.text_tables import text_table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from rich.table import Table

    from hicache_storage.request_log.reading import LogReader, Selection, Summary
    from hicache_storage.request_log.records import RequestRecord

SUMMARY = "Show why requests hit or missed, from the explain log of an engine or a replay."

_FOUND = 1
_LISTED = 200
_HASH = re.compile(r"[0-9a-f]{4,128}")
_SHORT_HASH_DIGITS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    add = parser.add_argument
    add(
        "file",
        type=Path,
        metavar="FILE",
        help="the log: the file that explain_log or --explain-log named",
    )
    add(
        "--request",
        metavar="ID",
        help="show one request; if the engine logs no ids, give the first digits of the hash of its"
        " first page",
    )
    add(
        "--hash",
        metavar="HEX",
        help="show the records about one page; give the first digits of its hash",
    )
    add("--since", type=age, metavar="AGE", help="only records of the last 90s, 30m, 12h, 1d or 2w")
    add("--json", action="store_true", help="print JSON instead of tables and sentences")


def run(arguments: argparse.Namespace) -> int:
    """Print a summary, or the records of a request or a page. Return 1 if there are no such records."""
    from hicache_storage.request_log.reading import LogReader, Selection  # noqa: PLC0415 - keeps `--help` fast

    page_hash: str | None = arguments.hash and arguments.hash.lower()
    if page_hash is not None and _HASH.fullmatch(page_hash) is None:
        raise ConfigError("--hash: must be at least the first four hexadecimal digits of a hash")
    selection = Selection(
        request=arguments.request,
        page_hash=page_hash,
        since_s=None if arguments.since is None else time.time() - arguments.since,
    )
    reader = LogReader(arguments.file)
    if arguments.request is None and page_hash is None:
        return _summarize(reader, selection, as_json=arguments.json)
    return _tell(reader, selection, as_json=arguments.json)


# --- one request, or one page ------------------------------------------------------------------------


def _tell(reader: LogReader, selection: Selection, *, as_json: bool) -> int:
    records = list(reader.records(selection))
    if as_json:
        print_json({"records": [record.as_json() for record in records]})
    elif records:
        for record in records[-_LISTED:]:
            sys.stdout.write("".join(f"{escaped(line)}\n" for line in _story(record)))
        if len(records) > _LISTED:
            earlier = counted(len(records) - _LISTED, "earlier record")
            sys.stdout.write(f"{earlier} left out: use --json to see all of them.\n")
    else:
        sys.stdout.write(
            "No record matches. It may be older than the log or in another engine's log, or the"
            " engine never asked the"
            f" cache.{_faults(reader.dropped_records, reader.unreadable_lines)}\n"
        )
    return 0 if records else _FOUND


def _story(record: RequestRecord) -> Iterator[str]:
    """Yield a record in plain words: a line about the operation, and a line about the missing page."""
    yield (f"{format_time(record.at_s)}  {record.engine}, rank {record.rank}: {_subject(record)}")
    yield f"  {_counts(record)}"
    if record.reason is not None:
        yield f"  {_gap(record)}"
    if len(record.reasons) > 1:
        told = ", ".join(
            f"{pages:,} {_words(reason.name)}" for reason, pages in record.reasons.items()
        )
        yield f"  missing pages by reason: {told}"


def _subject(record: RequestRecord) -> str:
    if record.request is not None:
        return f"{record.operation.value} of request {record.request!r}"
    if record.first_hash is None:
        return record.operation.value
    return f"{record.operation.value} of pages from {record.first_hash[:_SHORT_HASH_DIGITS]}"


def _counts(record: RequestRecord) -> str:
    from hicache_storage.request_log.records import Operation  # noqa: PLC0415

    verbs = {
        Operation.PREFETCH: "usable",
        Operation.LOOKUP: "found",
        Operation.LOAD: "loaded",
        Operation.STORE: "stored",
    }
    pages = f"{counted(record.asked_pages, 'page')} {_were(record.asked_pages)}"
    text = f"{record.hit_pages:,} of {pages} {verbs[record.operation]}"
    if record.l2_pages is not None:
        text += (
            f" ({record.l2_pages:,} from host memory,"
            f" {record.hit_pages - record.l2_pages:,} from storage)"
        )
    if record.unused_pages:
        text += f", {record.unused_pages:,} more found but not used"
    if record.elapsed_s is not None:
        text += f", after {_duration(record.elapsed_s)}"
    return text


def _gap(record: RequestRecord) -> str:
    assert record.reason is not None
    page = "" if record.page is None else f" {record.page}"
    pool = "" if record.pool is None else f" of pool {record.pool!r}"
    page_hash = "" if record.page_hash is None else f" ({record.page_hash[:_SHORT_HASH_DIGITS]})"
    rank = "" if record.other_rank is None else f" (rank {record.other_rank})"
    return f"page{page}{pool}{page_hash} {record.reason.value}{rank}"


def _duration(elapsed_s: float) -> str:
    return f"{elapsed_s:.2f} s" if elapsed_s >= 1 else f"{1000 * elapsed_s:.1f} ms"


# --- all requests ------------------------------------------------------------------------------------


def _summarize(reader: LogReader, selection: Selection, *, as_json: bool) -> int:
    from hicache_storage.request_log.reading import summary_of  # noqa: PLC0415

    summary = summary_of(reader, selection)
    if as_json:
        print_json(_summary_json(summary))
    else:
        print_lines(output_console(), _parts(summary))
    return 0


def _parts(summary: Summary) -> Iterator[Table | str]:
    if summary.reasons:
        yield _reason_table(summary)
    faults = _faults(summary.dropped_records, summary.unreadable_lines)
    if summary.first_s is None or summary.last_s is None:
        yield f"There are no records.{faults}"
        return
    unused = f" {summary.unused_pages:,} more found but not used;" * bool(summary.unused_pages)
    have = "has" if summary.whole_records == 1 else "have"
    yield (
        f"{counted(summary.records, 'record')} from {format_time(summary.first_s)} to"
        f" {format_time(summary.last_s)}\n"
        f"{summary.hit_pages:,} of {counted(summary.asked_pages, 'page')} hit;{unused}"
        f" {counted(summary.whole_records, 'record')} {have} every page{faults}"
    )


def _reason_table(summary: Summary) -> Table:
    titles = ("operation", "reason", "records", "pages", "the first missing page")
    rows = [
        (
            operation.value,
            _words(reason.name),
            f"{count.records:,}",
            f"{count.missing_pages:,}",
            reason.value,
        )
        for (operation, reason), count in sorted(
            summary.reasons.items(), key=lambda item: -item[1].records
        )
    ]
    return text_table(titles, rows, "llrrL")


def _summary_json(summary: Summary) -> dict[str, object]:
    return {
        **{each.name: getattr(summary, each.name) for each in fields(summary)},
        "reasons": [
            {
                "operation": operation.value,
                "reason": reason.name.lower(),
                "records": count.records,
                "missing_pages": count.missing_pages,
                "latest": None if count.latest is None else count.latest.as_json(),
            }
            for (operation, reason), count in summary.reasons.items()
        ],
    }


def _faults(dropped_records: int, unreadable_lines: int) -> str:
    dropped = f"\n{counted(dropped_records, 'record')} {_were(dropped_records)} dropped"
    unreadable = f"\n{counted(unreadable_lines, 'line')} cannot be read"
    return dropped * bool(dropped_records) + unreadable * bool(unreadable_lines)


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


def _words(name: str) -> str:
    return name.lower().replace("_", " ")

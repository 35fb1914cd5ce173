"""Read the records of an explain log: select them by request, page and time, and count the reasons."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, shown
from hicache_storage.request_log.log_file import older_file
from hicache_storage.request_log.records import (
    MAX_ID_CHARACTERS,
    Operation,
    RequestRecord,
)
from hicache_storage.scalars import check_integer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hicache_storage.request_log.reasons import Reason

MIN_HASH_DIGITS = 4
_MAX_LINE_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A choice of records. A record must match every field that is not None."""

    request: str | None = None
    """The id of the request, or the first digits of the hash of the request's first page."""
    page_hash: str | None = None
    """The first digits of the hash of the first page, or of the first missing page."""
    since_s: float | None = None
    """The earliest time at which a record's operation may have ended, in seconds since 1970."""

    def __contains__(self, record: RequestRecord) -> bool:
        if self.since_s is not None and record.at_s < self.since_s:
            return False
        if self.request is not None and not _is_request(record, self.request):
            return False
        return self.page_hash is None or any(
            found is not None and found.startswith(self.page_hash)
            for found in (record.first_hash, record.page_hash)
        )


@dataclass(slots=True)
class ReasonCount:
    """The records of one operation that give the same reason for their first missing page."""

    records: int = 0
    missing_pages: int = 0
    latest: RequestRecord | None = None


@dataclass(slots=True)
class Summary:
    """The counts of a log's records."""

    records: int = 0
    whole_records: int = 0
    """Records of requests that found every page."""
    asked_pages: int = 0
    hit_pages: int = 0
    unused_pages: int = 0
    l2_pages: int = 0
    first_s: float | None = None
    last_s: float | None = None
    dropped_records: int = 0
    unreadable_lines: int = 0
    reasons: dict[tuple[Operation, Reason], ReasonCount] = field(
        default_factory=dict[tuple[Operation, "Reason"], ReasonCount]
    )

    def add(self, record: RequestRecord) -> None:
        """Count a record. For stores, pages are counted only by reason."""
        self.records += 1
        self.first_s = record.at_s if self.first_s is None else min(self.first_s, record.at_s)
        self.last_s = record.at_s if self.last_s is None else max(self.last_s, record.at_s)
        if record.operation is not Operation.STORE:
            self.asked_pages += record.asked_pages
            self.hit_pages += record.hit_pages
            self.unused_pages += record.unused_pages
            self.l2_pages += record.l2_pages or 0
            self.whole_records += record.reason is None
        if record.reason is not None:
            count = self.reasons.setdefault((record.operation, record.reason), ReasonCount())
            count.records += 1
            count.missing_pages += record.asked_pages - record.hit_pages
            if count.latest is None or record.at_s >= count.latest.at_s:
                count.latest = record


class LogReader:
    """A reader of the records in a log file, and in the older file that rotation keeps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.dropped_records: int = 0
        """How many records the writers dropped, in the part that was read."""
        self.unreadable_lines: int = 0
        """How many lines are not records."""

    def records(self, selection: Selection) -> Iterator[RequestRecord]:
        """Yield the selected records, in the order of the files.

        Raises:
            ConfigError: The file cannot be read, or none of its lines is a record.
        """
        lines = 0
        for lines, line in enumerate(self._lines(), start=1):  # noqa: B007 - the last number counts
            record = self._record(line)
            if record is not None and record in selection:
                yield record
        if lines and self.unreadable_lines == lines:
            raise ConfigError(
                f"{shown(self._path)}: is not an explain log, because none of its lines is a"
                " record. Give the file that explain_log or --explain-log named"
            )

    def _lines(self) -> Iterator[str]:
        older = older_file(self._path)
        for path in (older, self._path) if os.path.isfile(older) else (self._path,):  # noqa: PTH113 - no error
            try:
                with path.open(encoding="utf-8", errors="replace") as file:
                    yield from iter(lambda: file.readline(_MAX_LINE_CHARACTERS), "")
            except OSError as error:
                raise ConfigError(
                    f"{shown(path)}: cannot be read: {error.strerror or error}"
                ) from None

    def _record(self, line: str) -> RequestRecord | None:
        try:
            value = json.loads(line)
            if "dropped_records" in value:
                self.dropped_records += check_integer(
                    "dropped_records", value["dropped_records"], least=0
                )
                return None
            return RequestRecord.model_validate(value)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            self.unreadable_lines += 1
            return None


def summary_of(reader: LogReader, selection: Selection) -> Summary:
    """Return the counts of the selected records."""
    summary = Summary()
    for record in reader.records(selection):
        summary.add(record)
    summary.dropped_records = reader.dropped_records
    summary.unreadable_lines = reader.unreadable_lines
    return summary


def _is_request(record: RequestRecord, name: str) -> bool:
    if record.request is not None:
        return record.request == name[:MAX_ID_CHARACTERS]
    is_hash = len(name) >= MIN_HASH_DIGITS and record.first_hash is not None
    return is_hash and str(record.first_hash).startswith(name.lower())

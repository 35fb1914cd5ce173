"""The explain log: write the results of a page store as records, to a file of JSON lines."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError
from hicache_storage.page_store.results import Verdict
from hicache_storage.request_log.line_writer import LineWriter
from hicache_storage.request_log.log_file import LogFile
from hicache_storage.request_log.reasons import Reason
from hicache_storage.request_log.records import Operation, RequestRecord, dropped_line
from hicache_storage.request_log.settings import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.page_store.results import Match
    from hicache_storage.request_log.settings import ExplainLogSettings


class ExplainLog:
    """A log of one rank's requests. Thread-safe. No call that adds a record waits or raises."""

    def __init__(self, file: LogFile, *, engine: str, rank: int = 0) -> None:
        """Open the file, and start the thread that writes it.

        Raises:
            OSError: The file cannot be written.
        """
        self._engine = engine
        self._rank = rank
        self._writer = LineWriter(file, dropped_line=self._dropped_line)

    @property
    def dropped_records(self) -> int:
        """The number of records dropped so far."""
        return self._writer.dropped_lines

    def add(self, operation: Operation, **fields: Any) -> None:
        """Add a record. `fields` are its fields except time, operation, engine and rank."""
        self.add_later(operation, lambda: fields)

    def add_later(self, operation: Operation, fields: Callable[[], dict[str, Any]]) -> None:
        """Add a record. The writer's thread calls `fields` to get the same fields as in `add`."""
        self._writer.add(partial(self._line, time.time(), operation, fields))

    def add_match(
        self, hashes: Sequence[str], match: Match, pools: Sequence[str], *, elapsed_s: float
    ) -> None:
        """Add the lookup of a prefix in `pools`, which has one name for each row of the match."""
        hashes = list(hashes)
        self.add_later(Operation.LOOKUP, partial(_match_fields, hashes, match, pools, elapsed_s))

    def add_pages(
        self,
        operation: Operation,
        hashes: Sequence[str],
        verdicts: Sequence[Sequence[Verdict]],
        pool: str,
        **fields: Any,
    ) -> None:
        """Add a lookup, a load or a store of pages of one pool.

        `verdicts` has a row for each part of the pool. `fields` are the record's other fields. A
        store gets no record if every page was written.
        """
        if operation is Operation.STORE and all(
            verdict is Verdict.OK for row in verdicts for verdict in row
        ):
            return
        self.add_later(
            operation, partial(_page_fields, operation, list(hashes), verdicts, pool, fields)
        )

    def close(self) -> None:
        """Write the waiting records, for at most some seconds, and end the thread. Idempotent."""
        self._writer.close()

    # --- in the writer's thread ----------------------------------------------------------------------

    def _line(self, at_s: float, operation: Operation, fields: Callable[[], dict[str, Any]]) -> str:
        record = RequestRecord(
            at_s=at_s, engine=self._engine, rank=self._rank, operation=operation, **fields()
        )
        return record.line()

    def _dropped_line(self, records: int) -> str:
        return dropped_line(records, time.time(), self._engine, self._rank)


def _match_fields(
    hashes: Sequence[str], match: Match, pools: Sequence[str], elapsed_s: float
) -> dict[str, Any]:
    """Return the fields for a prefix lookup. The prefix ends at the first page that a pool lacks."""
    page = match.pages
    found: dict[str, Any] = {
        "asked_pages": len(hashes),
        "hit_pages": page,
        "first_hash": hashes[0] if hashes else None,
        "elapsed_s": elapsed_s,
    }
    if page < len(hashes):
        row = next((row for row, present in enumerate(match.present) if not present[page]), None)
        # No pool lacks this page if a longer prefix would end in a window with a gap.
        failure = None if row is None else match.failures[row]
        found |= {
            "page": page,
            "page_hash": hashes[page],
            "pool": None if row is None else pools[row],
            "reason": Reason.of_lookup(failure or Verdict.MISS),
        }
    return found


def _page_fields(
    operation: Operation,
    hashes: Sequence[str],
    verdicts: Sequence[Sequence[Verdict]],
    pool: str,
    fields: dict[str, Any],
) -> dict[str, Any]:
    """Return the fields for a lookup or transfer, with the reasons for its missing pages."""
    reason_of = Reason.of_lookup if operation is Operation.LOOKUP else Reason.of
    reasons = [
        next((reason_of(verdict) for verdict in column if verdict is not Verdict.OK), None)
        for column in zip(*verdicts, strict=True)
    ]
    missing = Counter(reason for reason in reasons if reason is not None)
    found: dict[str, Any] = {
        "asked_pages": len(hashes),
        "hit_pages": reasons.count(None),
        "first_hash": hashes[0] if hashes else None,
        "pool": pool,
        "reasons": missing,
        **fields,
    }
    page = next((page for page, reason in enumerate(reasons) if reason is not None), None)
    if page is not None:
        found |= {"page": page, "page_hash": hashes[page], "reason": reasons[page]}
    return found


def open_explain_log(
    settings: ExplainLogSettings, *, engine: str, rank: int = 0
) -> ExplainLog | None:
    """Open the explain log named in an adapter's settings. Return None if none is named.

    Raises:
        ConfigError: The file cannot be written.
    """
    if not settings.explain_log:
        return None
    file = LogFile(path_of(settings.explain_log), settings.log_file_nbytes, alone=False)
    try:
        return ExplainLog(file, engine=engine, rank=rank)
    except OSError as error:
        raise ConfigError(
            f"{engine}: explain_log: {settings.explain_log} cannot be written:"
            f" {error.strerror or error}"
        ) from None

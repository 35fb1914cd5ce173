"""A whole reservation, and the whole end of one, in one statement each: triggers of temporary views.

A thread gives up the interpreter lock for each step of a statement, and may wait 5 ms to win it back.
The transaction of `sqlite_tables` takes a dozen statements, these take one. A statement that finds
anything but the usual state changes nothing. Its caller goes on with that transaction then.

The usual state of a reservation: enough slots are free, or the oldest pages, all of the same key space,
make room for it. The usual end: no other writer has added one of the pages meanwhile.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from hicache_backends.hf3fs.layout import STAMP_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.index.base import Entry

AVAILABLE: bool = sqlite3.sqlite_version_info >= (3, 35)
"""True where SQLite has RETURNING. Without it a reservation takes its transaction."""
MOST_PAGES = 4096
"""The largest batch of one statement: SQLite takes 32766 variables."""

_USED = "(SELECT coalesce(sum(taken * slot_nbytes), 0) FROM spaces)"
_USED_AND_WANTED = f"{_USED} + NEW.count * NEW.slot_nbytes"
_OLDEST = "FROM pages ORDER BY used_ns, space, page_hash LIMIT NEW.evicted"
_LOWEST = "FROM free WHERE space = NEW.space ORDER BY slot LIMIT NEW.count"
# `changes()` is the number of rows of the statement before, within the trigger.
_VIEWS = f"""
CREATE TEMP VIEW reservation AS SELECT
    NULL AS space, NULL AS slot_nbytes, NULL AS count, NULL AS stamps,
    NULL AS evicted, NULL AS high_nbytes, NULL AS capacity_nbytes;
CREATE TEMP TRIGGER reserve INSTEAD OF INSERT ON reservation BEGIN
    SELECT RAISE(ABORT, 'the estimate of the used bytes is wrong')
        WHERE (NEW.evicted > 0) <> coalesce({_USED_AND_WANTED} > NEW.high_nbytes, 0);
    SELECT RAISE(ABORT, 'pages of other key spaces are older')
        WHERE EXISTS (SELECT 1 FROM (SELECT space {_OLDEST}) WHERE space <> NEW.space);
    INSERT INTO free SELECT space, slot {_OLDEST};
    SELECT RAISE(ABORT, 'there are too few pages') WHERE changes() <> NEW.evicted;
    DELETE FROM pages WHERE space = NEW.space AND page_hash IN (SELECT page_hash {_OLDEST});
    UPDATE spaces SET taken = taken - NEW.evicted WHERE space = NEW.space;
    SELECT RAISE(ABORT, 'the capacity is used up')
        WHERE {_USED_AND_WANTED} > NEW.capacity_nbytes;
    INSERT INTO reserved
        SELECT space, slot, substr(
            NEW.stamps, 1 + {STAMP_NBYTES} * (row_number() OVER (ORDER BY slot) - 1), {STAMP_NBYTES}
        ) FROM (SELECT space, slot {_LOWEST});
    SELECT RAISE(ABORT, 'there are too few free slots') WHERE changes() <> NEW.count;
    DELETE FROM free WHERE space = NEW.space AND slot IN (SELECT slot {_LOWEST});
    UPDATE spaces SET taken = taken + NEW.count WHERE space = NEW.space;
END;
CREATE TEMP VIEW settlement AS SELECT
    NULL AS space, NULL AS page_hash, NULL AS slot, NULL AS stamp, NULL AS used_ns;
CREATE TEMP TRIGGER settle INSTEAD OF INSERT ON settlement BEGIN
    DELETE FROM reserved WHERE space = NEW.space AND slot = NEW.slot AND stamp = NEW.stamp;
    SELECT RAISE(ABORT, 'there is no such reservation') WHERE changes() <> 1;
    INSERT INTO pages VALUES (NEW.space, NEW.page_hash, NEW.slot, NEW.stamp, NEW.used_ns);
END;
"""  # noqa: S608 - constants only
# A stamp of this reservation begins at a multiple of its size.
_RESERVE = f"""
INSERT INTO reservation VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) RETURNING {_USED}, (
    SELECT group_concat(slot) FROM reserved
    WHERE space = ?1 AND instr(?4, stamp) % {STAMP_NBYTES} = 1
)
"""  # noqa: S608 - constants only


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of a reservation."""

    space: bytes
    slot_nbytes: int
    stamps: Sequence[bytes]
    """Stamps of this writer, in the order of the writes: one for each slot."""
    evicted: int
    """The number of pages that must go first, by the caller's estimate of the used bytes."""
    high_nbytes: float | None
    """The high watermark. Pages must go where the used and wanted bytes exceed it. None: no capacity."""
    capacity_nbytes: int | None


def prepare(connection: sqlite3.Connection) -> None:
    """Give a new connection what the other functions need."""
    if AVAILABLE:
        connection.executescript(_VIEWS)


def reserve(connection: sqlite3.Connection, request: Request) -> tuple[list[int], int] | None:
    """Reserve a slot for each stamp; return the slots, in this order, and the bytes in use then.

    Return None, with nothing changed, where the state is not the usual one.
    """
    arguments = (
        *(request.space, request.slot_nbytes, len(request.stamps), b"".join(request.stamps)),
        *(request.evicted, request.high_nbytes, request.capacity_nbytes),
    )
    try:
        ((used_nbytes, slots),) = connection.execute(_RESERVE, arguments).fetchall()
    except sqlite3.IntegrityError:
        return None
    return sorted(map(int, slots.split(","))), used_nbytes


def settle(connection: sqlite3.Connection, space: bytes, entries: Sequence[Entry]) -> bool:
    """Give every reserved slot to its page.

    Return False, with nothing changed, where a page is there already or a reservation is missing.
    """
    rows = [
        (space, bytes.fromhex(page_hash), *place, used_ns) for page_hash, place, used_ns in entries
    ]
    values = ",".join(["(?,?,?,?,?)"] * len(rows))
    try:
        connection.execute(
            f"INSERT INTO settlement VALUES {values}",  # noqa: S608 - question marks only
            [*chain.from_iterable(rows)],
        )
    except sqlite3.IntegrityError:
        return False
    return True

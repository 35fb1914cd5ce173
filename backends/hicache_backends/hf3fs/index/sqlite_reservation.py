"""The slots that one set asks for, found in one transaction of a SQLite index.

Free ones first; then those of dead writers, new ones, and those of the least recently used pages. With a
capacity pages go before it is reached: from the high watermark on, down to the low one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_backends.hf3fs.index import sqlite_rows as rows
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.slots import Geometry, Place
from hicache_backends.hf3fs.writer import is_dead, tokens, writer_of, written_ns

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from hicache_backends.hf3fs.index.base import Limits
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.writer import Writer

# What is evicted at once beyond what is needed: a set waits for it.
_EVICTED_AHEAD = 1000
_OLDEST = "SELECT space, page_hash, slot, slot_nbytes FROM pages JOIN spaces USING (space)"


class Reservation:
    """One set's, in one transaction."""

    def __init__(
        self,
        db: sqlite3.Connection,
        files: SlotFiles,
        limits: Limits,
        writer: Writer,
        layout: Layout,
    ) -> None:
        self._db = db
        self._files = files
        self._space = rows.id_of(files)
        self._limits = limits
        self._writer = writer
        self._layout = layout
        self._slot_nbytes = files.geometry.slot_nbytes
        self.evicted = 0

    def taken(self, count: int) -> list[Place]:
        """Reserve so many slots, or as many as there can be."""
        db, space = self._db, self._space
        rows.register(db, self._files)
        count = self._with_room(count)
        slots = self._free(count)
        if len(slots) < count and self._collect_dead():
            slots = self._free(count)
        if len(slots) < count:
            self._grow(count - len(slots))
            slots = self._free(count)
        if len(slots) < count and self._limits.capacity_nbytes is not None:
            self.evicted += self._evict((count - len(slots)) * self._slot_nbytes, own=True)
            slots = self._free(count)
        places = [Place(slot, self._writer.stamp()) for slot in slots]
        db.executemany(
            "DELETE FROM free WHERE space = ? AND slot = ?", [(space, slot) for slot in slots]
        )
        db.executemany(
            "INSERT INTO reserved VALUES (?, ?, ?)", [(space, *place) for place in places]
        )
        db.execute("UPDATE spaces SET taken = taken + ? WHERE space = ?", (len(slots), space))
        return places

    def _with_room(self, count: int) -> int:
        """Evict what must go for `count` more slots; how many there is room for then."""
        wanted_nbytes = count * self._slot_nbytes
        if self._limits.to_evict(rows.used_nbytes(self._db), wanted_nbytes):
            self._collect_dead()
        surplus = self._limits.to_evict(rows.used_nbytes(self._db), wanted_nbytes)
        if surplus:
            self.evicted += self._evict(surplus, ahead=count + _EVICTED_AHEAD)
        room = self._limits.room(rows.used_nbytes(self._db))
        return count if room is None else min(count, room // self._slot_nbytes)

    def _evict(self, nbytes: int, *, ahead: int | None = None, own: bool = False) -> int:
        """Remove the least recently used pages, until so many bytes are free; how many pages."""
        victims: dict[bytes, list[tuple[bytes, int]]] = {}
        query = f"{_OLDEST} {'WHERE space = ?' if own else ''} ORDER BY used_ns LIMIT ?"
        most = ahead or -(-nbytes // self._slot_nbytes)
        for space, page_hash, slot, slot_nbytes in self._db.execute(
            query, (self._space, most) if own else (most,)
        ):
            if nbytes <= 0:
                break
            nbytes -= slot_nbytes
            victims.setdefault(space, []).append((page_hash, slot))
        for space, pages in victims.items():
            self._remove(space, pages)
        return sum(map(len, victims.values()))

    def _remove(self, space: bytes, pages: Sequence[tuple[bytes, int]]) -> None:
        rows.remove(self._db, space, [page_hash for page_hash, _ in pages])
        slots = [slot for _, slot in pages]
        rows.free(self._db, space, slots)
        if space != self._space:
            owner = self._layout.key_space(space.hex())
            if owner is not None:
                SlotFiles(self._layout, Geometry(owner)).give_back(slots)

    def _free(self, count: int) -> list[int]:
        query = "SELECT slot FROM free WHERE space = ? ORDER BY slot LIMIT ?"
        return [row[0] for row in self._db.execute(query, (self._space, count))]

    def _grow(self, missing: int) -> None:
        query = "SELECT allocated FROM spaces WHERE space = ?"
        (before,) = self._db.execute(query, (self._space,)).fetchone()
        room = self._limits.room(rows.used_nbytes(self._db))
        most = None if room is None else room // self._slot_nbytes
        after = self._files.grow(before, missing, most)
        self._db.executemany(
            "INSERT INTO free VALUES (?, ?)", [(self._space, slot) for slot in range(before, after)]
        )
        self._db.execute("UPDATE spaces SET allocated = ? WHERE space = ?", (after, self._space))

    def _collect_dead(self) -> bool:
        return collect_dead(self._db, self._layout, self._writer)


def collect_dead(db: sqlite3.Connection, layout: Layout, writer: Writer) -> bool:
    """Free what writers had reserved that have died; whether there was anything."""
    reserved = db.execute("SELECT space, slot, stamp FROM reserved").fetchall()
    latest = dict.fromkeys(tokens(layout.writers), 0)
    for _, _, stamp in reserved:
        token = writer_of(stamp)
        latest[token] = max(latest.get(token, 0), written_ns(stamp))
    dead = {
        token
        for token, reserved_ns in latest.items()
        if token != writer.token and is_dead(layout.writers, token, reserved_ns)
    }
    left = [(space, slot) for space, slot, stamp in reserved if writer_of(stamp) in dead]
    for space, slot in left:
        db.execute("DELETE FROM reserved WHERE space = ? AND slot = ?", (space, slot))
        rows.free(db, space, [slot])
    return bool(left)

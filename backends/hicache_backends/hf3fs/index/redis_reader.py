"""The reading half of the index for many hosts."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hicache_backends.hf3fs.index.base import MOST_COUNTED, Figures, IndexReader, View
from hicache_backends.hf3fs.index.redis_client import RedisClient
from hicache_backends.hf3fs.index.redis_epoch import KnownEpoch
from hicache_backends.hf3fs.layout import STAMP_NBYTES, Place
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.backend_support.manifest import PAGE_HASH
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from hicache_backends.hf3fs.index.redis_epoch import IndexId
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.slot_files import SlotFiles

_STEP = 500
_MOST_SLOTS = 1 << 40
_MOST_US = 2**63 // 1000
"""The largest time that any clock has: in nanoseconds it fits in 64 bits."""


class RedisReader(IndexReader):
    """An index that is only read."""

    def __init__(
        self, client: RedisClient, prefix: str, epoch: KnownEpoch, timeout_s: float
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._epoch = epoch
        self._timeout_s = timeout_s

    @contextmanager
    def view(self, files: SlotFiles, deadline: Deadline) -> Generator[View, None, None]:
        index = self._epoch.require(deadline)
        name = f"{self._prefix}:pages:{files.geometry.space.id}"
        yield _RedisView(self._client, name, index, deadline)

    def used_ns(
        self, files: SlotFiles, hashes: Sequence[str], deadline: Deadline
    ) -> dict[str, int]:
        space_id = files.geometry.space.id
        with (
            self._client.call(deadline) as client,
            client.pipeline(transaction=False) as pipe,
        ):
            for page_hash in hashes:
                pipe.zscore(f"{self._prefix}:lru", f"{space_id} {page_hash}")
            times = pipe.execute()
        return {
            page_hash: int(used_us) * 1000
            for page_hash, used_us in zip(hashes, times, strict=True)
            if used_us is not None and abs(used_us) < _MOST_US
        }

    def pages(self, files: SlotFiles) -> Iterator[str]:
        for part in self._page_lists(files):
            yield from part

    def figures(self, now_ns: int, deadline: Deadline) -> Figures:
        with (
            self._client.call(deadline) as client,
            client.pipeline(transaction=True) as pipe,
        ):
            pipe.hget(f"{self._prefix}:state", "used")
            now_us, times = f"({now_ns // 1000}", f"{self._prefix}:lru"
            pipe.zrangebyscore(times, now_us, "+inf", start=0, num=MOST_COUNTED)
            used, from_future = pipe.execute()
            return Figures(int(used or 0), len(from_future))

    def close(self) -> None:
        self._epoch.close()
        self._client.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _run(
        self,
        deadline: Deadline,
        script: str,
        *arguments: object,
        parse: Callable[[Any], Any] | None = None,
    ) -> Any:
        return self._client.run(deadline, script, self._prefix, *arguments, parse=parse)

    def _page_lists(self, files: SlotFiles) -> Iterator[list[str]]:
        """Yield every page of the key space once, one list per step."""
        name = f"{self._prefix}:pages:{files.geometry.space.id}"
        index = self._epoch.require(Deadline(self._timeout_s))
        seen: set[str] = set()
        cursor = 0
        while True:
            with (
                self._client.call(Deadline(self._timeout_s)) as client,
                client.pipeline(transaction=True) as pipe,
            ):
                pipe.hscan(name, cursor, count=_STEP)
                pipe.info("server")
                pipe.hget(f"{self._prefix}:state", "maker")
                (cursor, found), info, maker = pipe.execute()
                require_same((info["run_id"], maker or b""), index)
                names = (each.decode(errors="replace") for each in found)
                fresh = [h for h in names if PAGE_HASH.fullmatch(h) and h not in seen]
            yield fresh
            seen.update(fresh)
            if not cursor:
                return


class _RedisView(View):
    def __init__(self, client: RedisClient, name: str, index: IndexId, deadline: Deadline) -> None:
        self._client = client
        self._name = name
        self._index = index
        self._deadline = deadline

    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        return self._find(hashes, self._deadline)

    def still(self, places: Mapping[str, Place], deadline: Deadline) -> AbstractSet[str]:
        now = self._find(list(places), deadline)
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}

    def _find(self, hashes: Sequence[str], deadline: Deadline) -> dict[str, Place]:
        if not hashes:
            return {}
        with (
            self._client.call(deadline) as client,
            client.pipeline(transaction=True) as pipe,
        ):
            pipe.hmget(self._name, hashes)
            pipe.info("server")
            found, info = pipe.execute()
            require_same(info["run_id"], self._index.run)
            return {
                page_hash: place_of(place)
                for page_hash, place in zip(hashes, found, strict=True)
                if place is not None
            }


def prefix_of(root_id: str) -> str:
    """Return the prefix of all keys of a root."""
    return f"hicache:hf3fs:{{{root_id}}}"


def require_same(now: object, before: object) -> None:
    """Raise if a server's run, or an index, has changed."""
    if now != before:
        raise StorageUnavailable("hf3fs: the Redis server of the index was restarted")


def replaced() -> StorageUnavailable:
    """Return the error for a call during which the index was lost and rebuilt."""
    return StorageUnavailable("hf3fs: the index was lost and rebuilt during the call: try again")


def place_of(value: bytes) -> Place:
    """Return the place that `value` names.

    Raises:
        ValueError: `value` does not name a place.
    """
    slot, _, stamp = value.decode("ascii").partition(" ")
    place = Place(int(slot), bytes.fromhex(stamp))
    if not 0 <= place.slot < _MOST_SLOTS or len(place.stamp) != STAMP_NBYTES:
        raise ValueError("an index of another program")
    return place


def open_reader(url: str, layout: Layout, timeout_s: float) -> RedisReader:
    """Open the index of a root that an engine has made."""
    prefix = prefix_of(layout.root_id(make=False))
    client = RedisClient(url)
    epoch = KnownEpoch(client, prefix, layout)
    reader = RedisReader(client, prefix, epoch, timeout_s)
    try:
        epoch.require_own(Deadline(timeout_s))
    except BaseException:
        reader.close()
        raise
    return reader

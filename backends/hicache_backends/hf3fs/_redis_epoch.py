"""When a Redis index may be trusted.

A server that was restarted, or that lost its data, does not know of writers that are still at work:
slots which it takes for free, or for another page's, may be written to. So nobody uses the index until
their leases have ended; then, where its data is lost, it is made from the slots' marks.
"""

from __future__ import annotations

import secrets
from itertools import islice
from typing import TYPE_CHECKING, Any

from hicache_backends.hf3fs import _redis_scripts as scripts
from hicache_backends.hf3fs._slot import Geometry
from hicache_backends.hf3fs._slot_files import SlotFiles
from hicache_backends.hf3fs._writer import written_ns
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_backends.hf3fs._layout import Layout

_SILENCE_MS = 60_000
_STEP = 500


class Epoch:
    """What of a Redis server one index relies on."""

    def __init__(self, client: Any, prefix: str, layout: Layout, lease_ms: int) -> None:
        self._client = client
        self._prefix = prefix
        self._layout = layout
        self._lease_ms = lease_ms

    def require(self) -> str:
        """The server's run id.

        Raises:
            StorageUnavailable: The index may not be used yet.
        """
        with self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            pipe.hmget(f"{self._prefix}:state", "made", "run", "until_ms")
            pipe.time()
            info, (made, run, until_ms), (seconds, micros) = pipe.execute()
        current: str = info["run_id"]
        if (run or b"").decode() != current:
            self._interrupt(current)
            return self.require()
        left_ms = int(until_ms) - (seconds * 1000 + micros // 1000)
        if left_ms > 0:
            raise StorageUnavailable(
                "hf3fs: the Redis server of the index was restarted: writers of before may be at work"
                f" for another {left_ms / 1000:.0f} s"
            )
        if not made:
            self._make()
        return current

    def _interrupt(self, run: str) -> None:
        spaces = list(self._layout.key_spaces())
        is_empty = all(not self._files(Geometry(space)).allocated() for space in spaces)
        pause_ms = 0 if is_empty else self._lease_ms
        self._client.eval(scripts.INTERRUPT, 1, self._prefix, run, pause_ms)

    def _make(self) -> None:
        """Make the index of what the slots say."""
        token = secrets.token_hex(8)
        if not self._client.set(f"{self._prefix}:maker", token, nx=True, px=_SILENCE_MS):
            raise StorageUnavailable("hf3fs: another process is making the index anew: try again")
        spaces = [space.id for space in self._layout.key_spaces()]
        names = ["lru", "leases", "allocated", "spaces"]
        names += [f"{kind}:{space_id}" for kind in ("pages", "free") for space_id in spaces]
        self._client.delete(*(f"{self._prefix}:{name}" for name in names))
        self._client.hset(f"{self._prefix}:state", "used", 0)
        for space in self._layout.key_spaces():
            self._fill(token, self._files(Geometry(space)))
        if not self._client.eval(scripts.FINISH, 1, self._prefix, token):
            raise StorageUnavailable("hf3fs: another process is making the index anew: try again")

    def _fill(self, token: str, files: SlotFiles) -> None:
        space_id, allocated = files.geometry.space.id, files.allocated()
        self._client.hset(f"{self._prefix}:spaces", space_id, files.geometry.slot_nbytes)
        self._client.hset(f"{self._prefix}:allocated", space_id, allocated)
        rows = _rows(files, allocated)
        while part := list(islice(rows, _STEP)):
            arguments = [field for row in part for field in row]
            if not self._client.eval(
                scripts.FILL, 1, self._prefix, token, _SILENCE_MS, space_id, *arguments
            ):
                raise StorageUnavailable(
                    "hf3fs: another process is making the index anew: try again"
                )

    def _files(self, geometry: Geometry) -> SlotFiles:
        return SlotFiles(self._layout, geometry)


def _rows(files: SlotFiles, allocated: int) -> Iterator[tuple[str, str, int]]:
    """Pages and free slots, as `FILL` takes them."""
    places = files.newest()
    for page_hash, place in places.items():
        value = f"{place.slot} {place.stamp.hex()}"
        yield page_hash, value, written_ns(place.stamp) // 1000
    taken = {place.slot for place in places.values()}
    for slot in range(allocated):
        if slot not in taken:
            yield "", str(slot), 0

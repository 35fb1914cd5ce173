"""Decide when a Redis index may be used, and rebuild a lost index.

A server that was restarted or lost its data has no record of the leases of writers that are still at
work. These writers may write to slots that are free in the server's data, or that belong to another
page. So no process uses the index until these leases have ended. Then a lost index is rebuilt from the
marks of the slots.
"""

from __future__ import annotations

import secrets
import time
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.hf3fs.index import redis_scripts as scripts
from hicache_backends.hf3fs.index.base import AT_OPEN_S, Rebuild
from hicache_backends.hf3fs.layout import Geometry, written_ns
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicache_backends.hf3fs.index.redis_client import RedisClient
    from hicache_backends.hf3fs.layout import Layout, Place

_SILENCE_MS = 60_000
_STEP = 500
_ATTEMPTS = 5
_RENEWAL_S = 10.0
_POLL_S = 0.1
_BUILT_MEANWHILE = 2


class IndexId(NamedTuple):
    """The identity of an index.

    A call ignores an answer if the index is not the one that the call began with.
    """

    run: str
    """The server's run id."""
    maker: bytes
    """The token of the process that made the index."""


class KnownEpoch:
    """A check that Redis was not restarted and still has the index that engines made."""

    def __init__(self, client: RedisClient, prefix: str, layout: Layout) -> None:
        self._client = client
        self._prefix = prefix
        self._layout = layout

    def require(self, deadline: Deadline) -> IndexId:
        """Return the identity of the index.

        Raises:
            StorageUnavailable: The index must not be used now.
        """
        is_known, is_made, index = self._look(deadline)
        if is_known and is_made:
            return index
        raise StorageUnavailable(
            "hf3fs: the Redis server of the index was restarted, or has lost the index: an engine must"
            " open the store first"
        )

    def require_own(self, deadline: Deadline) -> None:
        """Refuse this server if the root names another one, unless both names lead to the same server.

        Raises:
            ConfigError: The index is in another server.
        """
        noted, place = self._layout.index_server(), self._client.place
        if noted is None or noted[0] == place:
            return
        with self._client.call(deadline) as client:
            maker = client.hget(f"{self._prefix}:state", "maker")
        if not maker or maker.decode("latin-1") != noted[1]:
            raise ConfigError(
                f"hf3fs: index: the index of {self._layout.root} is in the Redis"
                f" server {noted[0]}, but {place} does not hold it: name that server; if the"
                " index has moved, stop all engines and remove index.redis"
            )

    def close(self) -> None:
        """End work that is still running. Idempotent."""

    def _look(self, deadline: Deadline) -> tuple[bool, bool, IndexId]:
        """Return whether the server's run is known, whether there is an index, and its identity.

        Raises:
            StorageUnavailable: Earlier writers may still be at work.
        """
        with (
            self._client.call(deadline) as client,
            client.pipeline(transaction=True) as pipe,
        ):
            pipe.info("server")
            pipe.hmget(f"{self._prefix}:state", "made", "run", "until_ms", "maker")
            pipe.time()
            info, (made, run, until_ms, maker), (seconds, micros) = pipe.execute()
            current: str = info["run_id"]
            is_known = run == current.encode()
            left_ms = int(until_ms or 0) - (seconds * 1000 + micros // 1000)
        if is_known and left_ms > 0:
            left = f"{left_ms / 1000:.0f} s"
            raise StorageUnavailable(
                "hf3fs: the Redis server of the index was restarted: earlier writers may still"
                f" write for another {left}",
                advice=f"wait {left}, then engines can open the store",
            )
        return is_known, bool(made), IndexId(current, maker or b"")


class Epoch(KnownEpoch):
    """A `KnownEpoch` for a process that writes: it reports restarts, and rebuilds a lost index."""

    def __init__(
        self, client: RedisClient, prefix: str, layout: Layout, lease_ms: int, timeout_s: float
    ) -> None:
        super().__init__(client, prefix, layout)
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self._rebuild = Rebuild(self._make)

    def require(self, deadline: Deadline, *, at_open: bool = False) -> IndexId:
        """Return the identity of the index. If its data is lost, rebuild the index.

        The wait for a rebuild ends with the deadline. With `at_open` it has no limit.

        Raises:
            StorageUnavailable: The index must not be used yet.
        """
        for _ in range(_ATTEMPTS):
            is_known, is_made, index = self._look(deadline)
            if not is_known:
                self._interrupt(deadline)
                continue
            if is_made:
                if at_open:
                    self._note(index.maker.decode("latin-1"))
                return index
            if at_open:
                self._rebuild_at_open()
                deadline = Deadline(deadline.timeout_s)
            else:
                self._rebuild.run(deadline)
        raise StorageUnavailable(
            "hf3fs: each call reaches another Redis server for the index: name one server"
        )

    def close(self) -> None:
        """End a running rebuild. Idempotent."""
        self._rebuild.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _rebuild_at_open(self) -> None:
        """Rebuild the index, or wait for another process that does, because a fleet opens together."""
        while True:
            try:
                return self._rebuild.run(Deadline(AT_OPEN_S))
            except _MadeElsewhere:
                is_known, is_made, _ = self._look(Deadline(self._timeout_s))
                if is_made or not is_known:
                    return None
                time.sleep(_POLL_S)

    def _note(self, maker: str) -> None:
        """Record where the index is, unless another name of its server is recorded."""
        noted, place = self._layout.index_server(), self._client.place
        if maker and noted != (place, maker) and (noted is None or noted[0] == place):
            self._layout.note_index_server(place, maker)

    def _interrupt(self, deadline: Deadline) -> None:
        """If the server was restarted, let no process use the index for one lease."""
        spaces = list(self._layout.key_spaces(skip_unreadable=False))
        is_empty = all(not self._files(Geometry(space)).allocated() for space in spaces)
        pause_ms = 0 if is_empty else self._lease_ms
        self._client.run(deadline, scripts.INTERRUPT, self._prefix, pause_ms)

    def _make(self) -> None:
        """Build the index from the marks of the slots. Each step has its own deadline."""
        token = secrets.token_hex(8)
        with self._client.call(Deadline(self._timeout_s)) as client:
            if not client.set(f"{self._prefix}:maker", token, nx=True, px=_SILENCE_MS):
                raise _MadeElsewhere
        spaces = list(self._layout.key_spaces(skip_unreadable=False))
        names = ["lru", "leases", "allocated", "spaces"]
        names += [f"{kind}:{space.id}" for kind in ("pages", "free") for space in spaces]
        maker = _Maker(self._client, self._prefix, token, self._timeout_s, self._rebuild.check)
        if maker.run(scripts.START, *names) == _BUILT_MEANWHILE:
            return
        for space in spaces:
            maker.fill(self._files(Geometry(space)))
        maker.finish()
        self._note(token)

    def _files(self, geometry: Geometry) -> SlotFiles:
        return SlotFiles(self._layout, geometry)


class _Maker:
    """The process that builds the index. It loses this role if it is silent for `_SILENCE_MS`.

    Each step sends the maker's token, and changes nothing if another maker has taken over.
    """

    def __init__(
        self,
        client: RedisClient,
        prefix: str,
        token: str,
        timeout_s: float,
        check: Callable[[], None],
    ) -> None:
        self._check = check
        self._client = client
        self._prefix = prefix
        self._token = token
        self._timeout_s = timeout_s

    def run(self, script: str, *arguments: object) -> int:
        """Run a script as the maker, and return its answer.

        Raises:
            StorageUnavailable: Another process is building the index now.
        """
        deadline = Deadline(self._timeout_s)
        answer: int = self._client.run(
            deadline, script, self._prefix, self._token, _SILENCE_MS, *arguments
        )
        if not answer:
            raise _MadeElsewhere
        return answer

    def fill(self, files: SlotFiles) -> None:
        """Send all slots of one key space to the server."""
        allocated = files.allocated()
        space = files.geometry.space.id, files.geometry.slot_nbytes, allocated
        renewal = Deadline(_RENEWAL_S)

        def on_slot() -> None:
            nonlocal renewal
            self._check()
            if renewal.passed():
                self.run(scripts.FILL, *space)
                renewal = Deadline(_RENEWAL_S)

        self.run(scripts.FILL, *space)
        rows = _rows(files.newest(on_slot), allocated)
        while part := list(islice(rows, _STEP)):
            self.run(scripts.FILL, *space, *(field for row in part for field in row))

    def finish(self) -> None:
        """Allow all processes to use the index."""
        self.run(scripts.FINISH)


def _rows(places: Mapping[str, Place], allocated: int) -> Iterator[tuple[str, str, int]]:
    """Yield pages and free slots in the form that `FILL` expects."""
    for page_hash, place in places.items():
        value = f"{place.slot} {place.stamp.hex()}"
        yield page_hash, value, written_ns(place.stamp) // 1000
    taken = {place.slot for place in places.values()}
    for slot in range(allocated):
        if slot not in taken:
            yield "", str(slot), 0


class _MadeElsewhere(StorageUnavailable):
    """Another process is rebuilding the index."""

    def __init__(self) -> None:
        super().__init__("hf3fs: another process is rebuilding the index: try again")

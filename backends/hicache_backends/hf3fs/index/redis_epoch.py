"""When a Redis index may be trusted.

A server that was restarted, or that lost its data, does not know of writers that are still at work:
slots which it takes for free, or for another page's, may be written to. So nobody uses the index until
their leases have ended; then, where its data is lost, it is made from the slots' marks.
"""

from __future__ import annotations

import secrets
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.hf3fs.background import AT_OPEN_S, Background
from hicache_backends.hf3fs.index import redis_scripts as scripts
from hicache_backends.hf3fs.slot_files import SlotFiles
from hicache_backends.hf3fs.slots import Geometry
from hicache_backends.hf3fs.writer import written_ns
from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.errors import StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicache_backends.hf3fs.index.redis_client import RedisClient
    from hicache_backends.hf3fs.layout import Layout
    from hicache_backends.hf3fs.slots import Place

_SILENCE_MS = 60_000
_STEP = 500
_ATTEMPTS = 5
_BEAT_S = 10.0


class Trusted(NamedTuple):
    """The index that a call found. An answer counts while it is the same."""

    run: str
    """The server's run id."""
    maker: bytes
    """Who made the index of what the slots say."""


class Epoch:
    """The life of a Redis server, and of one index in it."""

    def __init__(self, client: RedisClient, prefix: str, layout: Layout, lease_ms: int) -> None:
        self._client = client
        self._prefix = prefix
        self._layout = layout
        self._lease_ms = lease_ms
        self._making = Background()

    def require(self, deadline: Deadline, *, at_open: bool = False) -> Trusted:
        """Return what may be used; make the index where its data is lost.

        That is waited for until the deadline, or at open for as long as it takes.

        Raises:
            StorageUnavailable: The index may not be used yet.
        """
        for _ in range(_ATTEMPTS):
            with (
                self._client.call(deadline) as client,
                client.pipeline(transaction=True) as pipe,
            ):
                pipe.info("server")
                pipe.hmget(f"{self._prefix}:state", "made", "run", "until_ms", "maker")
                pipe.time()
                info, (made, run, until_ms, maker), (seconds, micros) = pipe.execute()
                current: str = info["run_id"]
                left_ms = int(until_ms or 0) - (seconds * 1000 + micros // 1000)
            if (run or b"").decode() != current:
                self._interrupt(current, deadline)
                continue
            if left_ms > 0:
                raise StorageUnavailable(
                    "hf3fs: the Redis server of the index was restarted: writers of before may be at"
                    f" work for another {left_ms / 1000:.0f} s"
                )
            if made:
                return Trusted(current, maker or b"")
            made_by = Deadline(AT_OPEN_S) if at_open else deadline
            self._making.run(partial(self._make, deadline.timeout_s), made_by)
            if at_open:
                deadline = Deadline(deadline.timeout_s)
        raise StorageUnavailable(
            "hf3fs: the Redis server of the index is another one at each call: name one server"
        )

    def close(self) -> None:
        """End what goes on. Idempotent."""
        self._making.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _interrupt(self, run: str, deadline: Deadline) -> None:
        spaces = list(self._layout.key_spaces())
        is_empty = all(not self._files(Geometry(space)).allocated() for space in spaces)
        pause_ms = 0 if is_empty else self._lease_ms
        self._client.run(deadline, scripts.INTERRUPT, self._prefix, run, pause_ms)

    def _make(self, timeout_s: float) -> None:
        """Make the index of what the slots say; each step of that has a deadline of its own."""
        token = secrets.token_hex(8)
        with self._client.call(Deadline(timeout_s)) as client:
            if not client.set(f"{self._prefix}:maker", token, nx=True, px=_SILENCE_MS):
                raise _made_elsewhere()
        spaces = list(self._layout.key_spaces())
        names = ["lru", "leases", "allocated", "spaces"]
        names += [f"{kind}:{space.id}" for kind in ("pages", "free") for space in spaces]
        maker = _Maker(self._client, self._prefix, token, timeout_s, self._making.check)
        maker.run(scripts.START, *names)
        for space in spaces:
            maker.fill(self._files(Geometry(space)))
        maker.finish()

    def _files(self, geometry: Geometry) -> SlotFiles:
        return SlotFiles(self._layout, geometry)


class _Maker:
    """Whoever makes the index, as long as it is not silent for `_SILENCE_MS`.

    Each step tells the server who asks, and changes nothing where somebody else has taken over.
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

    def run(self, script: str, *arguments: object) -> None:
        """Run a script as the maker.

        Raises:
            StorageUnavailable: Somebody else makes the index now.
        """
        deadline = Deadline(self._timeout_s)
        if not self._client.run(
            deadline, script, self._prefix, self._token, _SILENCE_MS, *arguments
        ):
            raise _made_elsewhere()

    def fill(self, files: SlotFiles) -> None:
        """Tell the server of all slots of one key space."""
        allocated = files.allocated()
        space = files.geometry.space.id, files.geometry.slot_nbytes, allocated
        beat = Deadline(_BEAT_S)

        def at_work() -> None:
            nonlocal beat
            self._check()
            if beat.passed():
                self.run(scripts.FILL, *space)
                beat = Deadline(_BEAT_S)

        self.run(scripts.FILL, *space)
        rows = _rows(files.newest(at_work), allocated)
        while part := list(islice(rows, _STEP)):
            self.run(scripts.FILL, *space, *(field for row in part for field in row))

    def finish(self) -> None:
        """Let everybody use the index."""
        self.run(scripts.FINISH)


def _rows(places: Mapping[str, Place], allocated: int) -> Iterator[tuple[str, str, int]]:
    """Yield pages and free slots, as `FILL` takes them."""
    for page_hash, place in places.items():
        value = f"{place.slot} {place.stamp.hex()}"
        yield page_hash, value, written_ns(place.stamp) // 1000
    taken = {place.slot for place in places.values()}
    for slot in range(allocated):
        if slot not in taken:
            yield "", str(slot), 0


def _made_elsewhere() -> StorageUnavailable:
    return StorageUnavailable("hf3fs: another process is making the index anew: try again")

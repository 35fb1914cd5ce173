"""The index of many hosts, in a Redis server. It holds no pages."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from hicache_backends.hf3fs import _redis_scripts as scripts
from hicache_backends.hf3fs._index import Index, View
from hicache_backends.hf3fs._redis_epoch import Epoch
from hicache_backends.hf3fs._slot import Place
from hicache_backends.hf3fs._writer import is_dead, tokens
from hicache_storage.errors import ConfigError, HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from hicache_backends.hf3fs._index import Entry, Limits
    from hicache_backends.hf3fs._layout import Layout
    from hicache_backends.hf3fs._slot_files import SlotFiles
    from hicache_backends.hf3fs._writer import Writer

_STEP = 500
# A call has written what it reserved, or given it up, `timeout_s` after it began. The rest is margin.
_LEASES_PER_TIMEOUT = 2
_LEASE_MARGIN_MS = 5000


class RedisIndex(Index):
    """Shared by all hosts that mount the root. Slots of dead writers come back when a lease ends."""

    def __init__(
        self, url: str, layout: Layout, limits: Limits, writer: Writer, timeout_s: float
    ) -> None:
        self._limits = limits
        self._writer = writer
        self._timeout_s = timeout_s
        self._lease_ms = int(1000 * timeout_s * _LEASES_PER_TIMEOUT) + _LEASE_MARGIN_MS
        self._prefix = f"hicache:hf3fs:{{{layout.root_id()}}}"
        self._unsettled: list[tuple[str, Place]] = []
        self._client = _client(url, timeout_s)
        self._epoch = Epoch(self._client, self._prefix, layout, self._lease_ms)
        try:
            with self._translated():
                self._epoch.require()
                for token in tokens(layout.writers) - {writer.token}:
                    is_dead(layout.writers, token, 0)
        except BaseException:
            self._client.close()
            raise

    @contextmanager
    def view(self, files: SlotFiles) -> Generator[View, None, None]:
        with self._translated():
            run = self._epoch.require()
            yield _RedisView(self._client, self._prefix, files.geometry.space.id, run)

    @contextmanager
    def writing(self, files: SlotFiles) -> Generator[View, None, None]:
        with self.view(files) as view:
            yield view

    def reserve(self, files: SlotFiles, count: int) -> list[Place]:
        stamps = [self._writer.stamp() for _ in range(count)]
        limits, geometry = self._limits, files.geometry
        arguments = [
            *(geometry.space.id, geometry.slot_nbytes, count),
            -1 if limits.capacity_nbytes is None else limits.capacity_nbytes,
            *(limits.high_watermark, limits.low_watermark, self._lease_ms),
            *(stamp.hex() for stamp in stamps),
        ]
        self._release_unsettled()
        with self._translated():
            run = self._epoch.require()
            with self._client.pipeline(transaction=True) as pipe:
                pipe.eval(scripts.RESERVE, 1, self._prefix, *arguments)
                pipe.info("server")
                (slots, before, fresh, evicted, used), info = pipe.execute()
            if info["run_id"] != run:
                raise StorageUnavailable("hf3fs: the Redis server of the index was restarted")
        self.evicted += evicted
        self.used_nbytes = used
        if fresh:
            files.grow(before, fresh, limits.room(used))
        return [Place(slot, stamp) for slot, stamp in zip(slots, stamps, strict=False)]

    def settle(self, files: SlotFiles, entries: Sequence[Entry], unused: Sequence[Place]) -> None:
        space_id = files.geometry.space.id
        arguments = [
            field
            for page_hash, (slot, stamp), used_ns in entries
            for field in (page_hash, slot, stamp.hex(), used_ns // 1000)
        ]
        try:
            with self._translated():
                doubles, lost = self._client.eval(
                    scripts.SETTLE, 1, self._prefix, space_id, *arguments
                )
                second = [_place(double) for double in doubles]
                if second:
                    files.spoil([place.slot for place in second])
                self._release(space_id, [*second, *unused])
        except BaseException:
            places = [entry.place for entry in entries] + list(unused)
            self._unsettled += [(space_id, place) for place in places]
            raise
        if lost:
            raise StorageUnavailable(
                f"hf3fs: {lost} pages took longer than a lease of {self._lease_ms / 1000:.0f} s:"
                " raise timeout_s"
            )

    def forget(self, files: SlotFiles, wrong: Mapping[str, Place]) -> None:
        arguments = [
            field for h, place in wrong.items() for field in (h, place.slot, place.stamp.hex())
        ]
        with self._translated():
            self._client.eval(scripts.FORGET, 1, self._prefix, files.geometry.space.id, *arguments)

    def delete(self, files: SlotFiles, hashes: Sequence[str]) -> None:
        space_id = files.geometry.space.id
        with self._translated():
            for start in range(0, len(hashes), _STEP):
                places = self._detached(space_id, hashes[start : start + _STEP])
                files.spoil([place.slot for place in places])
                self._release(space_id, places)

    def clear(self, files: SlotFiles) -> int:
        space_id = files.geometry.space.id
        removed = 0
        held: list[Place] = []
        with self._translated():
            hashes = list(self.pages(files))
            for start in range(0, len(hashes), _STEP):
                places = self._detached(space_id, hashes[start : start + _STEP])
                removed += len(places)
                held += places
            while slots := self._leased_free(space_id, stamp := self._writer.stamp()):
                held += [Place(slot, stamp) for slot in slots]
            files.give_back([place.slot for place in held])
            self._release(space_id, held)
        return removed

    def touch(self, used: Mapping[tuple[str, str], int]) -> None:
        times = {f"{space} {page_hash}": ns // 1000 for (space, page_hash), ns in used.items()}
        with self._translated():
            self._client.zadd(f"{self._prefix}:lru", times, xx=True, gt=True)

    def pages(self, files: SlotFiles) -> Iterator[str]:
        name = f"{self._prefix}:pages:{files.geometry.space.id}"
        seen: set[bytes] = set()
        cursor = 0
        while True:
            with self._translated():
                cursor, found = self._client.hscan(name, cursor, count=_STEP)
            yield from (page_hash.decode() for page_hash in found.keys() - seen)
            seen |= found.keys()
            if not cursor:
                return

    def close(self) -> None:
        self._client.close()

    def abandon(self) -> None:
        """Nothing to do: redis-py opens connections of its own in a forked process."""

    # --- parts ---------------------------------------------------------------------------------------

    def _detached(self, space_id: str, hashes: Sequence[str]) -> list[Place]:
        found = self._client.eval(
            scripts.DETACH, 1, self._prefix, space_id, self._lease_ms, *hashes
        )
        return [_place(each) for each in found]

    def _leased_free(self, space_id: str, stamp: bytes) -> list[int]:
        slots: list[int] = self._client.eval(
            scripts.LEASE_FREE, 1, self._prefix, space_id, self._lease_ms, _STEP, stamp.hex()
        )
        return slots

    def _release(self, space_id: str, places: Sequence[Place]) -> None:
        for start in range(0, max(1, len(places)), _STEP):
            part = places[start : start + _STEP]
            arguments = [field for place in part for field in (place.slot, place.stamp.hex())]
            self.used_nbytes = int(
                self._client.eval(scripts.RELEASE, 1, self._prefix, space_id, *arguments)
            )

    def _release_unsettled(self) -> None:
        """Slots that could not be settled when they should have been."""
        while self._unsettled:
            space_id, place = self._unsettled[-1]
            with self._translated():
                self._release(space_id, [place])
            self._unsettled.pop()

    @contextmanager
    def _translated(self) -> Generator[None, None, None]:
        try:
            yield
        except redis.TimeoutError as error:
            raise StorageTimeout(
                f"hf3fs: the Redis server of the index did not answer within {self._timeout_s} s"
            ) from error
        except redis.AuthenticationError:
            raise StorageUnavailable(
                "hf3fs: index: the Redis server refuses the user or the password"
            ) from None
        except redis.RedisError as error:
            raise StorageUnavailable(
                f"hf3fs: the Redis server of the index cannot be used ({type(error).__name__})"
            ) from error
        except OSError as error:
            if isinstance(error, HiCacheError):
                raise
            raise StorageUnavailable(f"hf3fs: {error.strerror or error}") from error


class _RedisView(View):
    def __init__(self, client: Any, prefix: str, space_id: str, run: str) -> None:
        self._client = client
        self._name = f"{prefix}:pages:{space_id}"
        self._run = run

    def find(self, hashes: Sequence[str]) -> dict[str, Place]:
        if not hashes:
            return {}
        with self._client.pipeline(transaction=True) as pipe:
            pipe.hmget(self._name, hashes)
            pipe.info("server")
            found, info = pipe.execute()
        if info["run_id"] != self._run:
            raise StorageUnavailable("hf3fs: the Redis server of the index was restarted")
        return {
            page_hash: _place(place)
            for page_hash, place in zip(hashes, found, strict=True)
            if place is not None
        }

    def still(self, places: Mapping[str, Place]) -> set[str]:
        now = self.find(list(places))
        return {page_hash for page_hash, place in places.items() if now.get(page_hash) == place}


def _place(value: bytes) -> Place:
    slot, _, stamp = value.decode().partition(" ")
    return Place(int(slot), bytes.fromhex(stamp))


def _client(url: str, timeout_s: float) -> Any:
    client_class: Any = redis.Redis  # the options of its from_url are untyped
    try:
        return client_class.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
    except (ValueError, TypeError):
        raise ConfigError('hf3fs: index: must be "sqlite" or a URL such as redis://host') from None

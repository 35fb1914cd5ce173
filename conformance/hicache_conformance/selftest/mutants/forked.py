"""Wrong stores: what they do in a child that was forked while they were open."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.sqlite_store import SqliteStore
from hicache_conformance.selftest.references.wire import WireStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace


@caught_by("KV-306", check="a_forked_child_works_or_is_refused")
class SharesItsSocketsWithItsChild(WireStore):
    """A forked child goes on with its parent's connections, and each reads the other's replies."""

    usable_after_fork = True


@caught_by("KV-306", check="a_forked_child_goes_on_when_its_parent_closes")
class WorksOnInAForkedChild(SqliteStore):
    """A forked child goes on with its parent's database handle, whose locks it has not inherited."""

    usable_after_fork = True


@caught_by("KV-306", check="a_forked_child_works_or_is_refused")
class AsksAThreadThatStayedBehind(DictStore):
    """A forked child waits for threads that only its parent has."""

    usable_after_fork = True

    def __init__(self, settings: DictSettings) -> None:
        super().__init__(settings)
        self._pool = ThreadPoolExecutor(1)

    def _present(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return self._pool.submit(super()._present, space, hashes).result()

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        super().close()

"""`tiered` as a HiCacheStorage: reads from the fastest tier that has a page, writes to all tiers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

from hicache_backends.tiered.copier import Copier
from hicache_backends.tiered.read import TieredRead
from hicache_backends.tiered.settings import TieredSettings
from hicache_backends.tiered.write import TieredWrite
from hicache_storage.backend_support.answers import answers_of, unanswered_in
from hicache_storage.backend_support.fork_local import ForkLocal
from hicache_storage.composition.claims import weakest
from hicache_storage.composition.member import noting
from hicache_storage.composition.storage import ComposedStorage
from hicache_storage.errors import StorageTimeout, UnsupportedOperation
from hicache_storage.settings import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import Capabilities, HiCacheStorage, PageTimes


class TieredStorage(ComposedStorage):
    """A storage of several tiers, the fastest first. Thread-safe.

    The first tier gets the caller's pages in the caller's thread, as if it were alone. The others are
    called on threads and get copies, so a call can leave them behind at their deadline.
    """

    backend = "tiered"
    settings_class = TieredSettings
    field, kind = "tiers", "tier"

    def __init__(
        self,
        tiers: Mapping[str, HiCacheStorage],
        settings: TieredSettings,
        *,
        read_only: bool = False,
    ) -> None:
        """Take over open storages by name, the fastest first."""
        super().__init__(tiers, settings, read_only=read_only)
        self._settings = settings
        self._first, *self._lower = self._members
        self._copiers = ForkLocal(self._new_copier, close=Copier.close)

    @staticmethod
    def _claims(members: Sequence[Capabilities]) -> Capabilities:
        """Return the weakest claims. Only the first tier accesses the caller's pages.

        A call is not bounded, because a get waits for one tier after the other, each for its time.
        """
        first = members[0]
        return replace(
            weakest(members),
            scatter_gather=first.scatter_gather,
            revocable=first.revocable,
            bounded=False,
        )

    # --- pages -----------------------------------------------------------------------------------

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Ask the tiers in order, each for the pages that are still missing."""
        self.ensure_open()
        found: list[bool | None] = [False] * len(hashes)
        errors: list[Exception] = []
        missing = list(range(len(hashes)))
        for member in self._members:
            if not missing:
                break
            asked, hits = [hashes[n] for n in missing], answers_of([None] * len(missing))
            with noting(errors):
                if member is self._first:
                    hits = member.exists(space, asked)
                else:
                    hits = member.begin_exists(space, asked).result()
            for at in unanswered_in(hits):
                found[missing[at]] = None
            for n in compress(missing, hits):
                found[n] = True
            missing = [n for n in missing if not found[n]]
        self._require_an_answer(errors, len(self._members))
        return answers_of(found)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Read each page from the first tier that has it whole, and heal the tiers above.

        If every tier answered, and a page is damaged wherever it is, its bytes are returned as they are,
        as by any other store.
        """
        self.ensure_open()
        fitting = _fitting(space, pages)
        if fitting is not None:
            return self._among(fitting, hashes, pages, partial(self.batch_get, space))
        if not hashes:
            return []
        read = TieredRead(self._copiers.get(), self._members, space, hashes, pages)
        read.ask_first()
        read.ask_below()
        self._require_an_answer(read.errors, len(self._members))
        return read.answers()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        """Store each page in every tier, or with `write: back` in the first one that takes it."""
        self.ensure_open()
        fitting = _fitting(space, pages)
        if fitting is not None:
            return self._among(fitting, hashes, pages, partial(self.batch_set, space))
        copier = self._copiers.get()
        most = copier.memory.most_pages(space.stored_nbytes)
        stored: list[bool] = []
        for start in range(0, len(hashes), most):
            cut = slice(start, start + most)
            with copier.moving(space, hashes[cut]) as move:
                write = TieredWrite(copier, self._members, space, hashes[cut], pages[cut])
                if self._settings.write == "through":
                    write.set_through(move)
                else:
                    write.set_back(move)
            self._require_an_answer(write.errors, len(self._members))
            write.doubt_the_refused()
            stored += write.stored
        return stored

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        """Delete each page from every tier, the lowest first, and from the copies under way.

        In this order a reader beside the delete sees the bytes of the highest tier to the end. Those of
        a lower tier may be other ones, if somebody has set other bytes under the same hash.
        """
        self.ensure_open()
        if not hashes:
            return []
        errors: list[Exception] = []
        with self._copiers.get().removal(space.id, hashes) as left:
            answers: list[list[bool]] = []
            for member in reversed(self._lower):
                with noting(errors):
                    answers.append(member.begin_delete(space, hashes).result())
            with noting(errors):
                answers.append(self._first.delete(space, hashes))
        self._require_an_answer(errors, len(self._members))
        if errors:  # a tier that did not answer may still have any of the pages
            return [False] * len(hashes)
        return [
            all(gone) and page_hash not in left
            for page_hash, *gone in zip(hashes, *answers, strict=True)
        ]

    def clear(self, space: KeySpace) -> int:
        """Remove every page of `space` from every tier, and from the copies under way.

        A copy that another process makes at this moment may stay.
        """
        self.ensure_open()
        if not self.capabilities.enumerable:
            raise UnsupportedOperation("tiered: a tier cannot list its pages, so none is cleared")
        with self._copiers.get().removal(space.id, None) as left:
            _refuse_running(left)
            pages = sum(1 for _ in self._scan(space))
            self._clear_members(lambda storage: storage.clear(space))
        return pages

    def remove_space(self, space_id: str) -> int:
        self.ensure_open()
        with self._copiers.get().removal(space_id, None) as left:
            _refuse_running(left)
            known = next((space for space in self._spaces() if space.id == space_id), None)
            pages = sum(1 for _ in self._scan(known)) if known else 0
            removed = self._clear_members(lambda storage: storage.remove_space(space_id))
        for member in self._members:
            member.forget_space(space_id)
        return pages if known else max(removed)

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the latest times of each page in a tier, once its copies under way have ended."""
        self.ensure_open()
        self._copiers.get().settle(space.id, hashes)
        return super().page_times(space, hashes)

    def close(self) -> None:
        """Finish the copies under way, within `timeout_s`, and close the tiers."""
        self._copiers.close()
        super().close()

    # --- parts -----------------------------------------------------------------------------------

    @staticmethod
    def _among(
        fitting: Sequence[int],
        hashes: Sequence[str],
        pages: Sequence[Page],
        call: Callable[[Sequence[str], Sequence[Page]], list[bool]],
    ) -> list[bool]:
        """Call for some of the pages. The others, which are of a wrong size, are misses and refused."""
        answers: list[bool | None] = [False] * len(hashes)
        some = call([hashes[n] for n in fitting], [pages[n] for n in fitting])
        unanswered = unanswered_in(some)
        for at, (n, answer) in enumerate(zip(fitting, some, strict=True)):
            answers[n] = None if at in unanswered else answer
        return answers_of(answers)

    def _new_copier(self) -> Copier:
        return Copier(self, self._settings, self._lower, read_only=self._read_only)


def _fitting(space: KeySpace, pages: Sequence[Page]) -> list[int] | None:
    """Return the positions of pages that have the size of `space`, or None if all have."""
    nbytes = space.stored_nbytes
    fitting = [n for n, page in enumerate(pages) if page.nbytes == nbytes]
    return None if len(fitting) == len(pages) else fitting


def _refuse_running(left: set[str]) -> None:
    if left:
        raise StorageTimeout(
            f"tiered: copies of {counted(len(left), 'page')} are still under way, so nothing was"
            " removed: try again"
        )

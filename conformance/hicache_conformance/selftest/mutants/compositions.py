"""Wrong compositions of stores; KV-6xx."""

from __future__ import annotations

import threading
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

from hicache_conformance.selftest.mutants import caught_by, own
from hicache_conformance.selftest.references.compositions import Striped, Tiered
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable
from hicache_storage.page import Page

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import HiCacheStorage, PageInfo

_BUFFERS = 4
_BUFFER_WITHIN_S = 0.05


def _read(storage: HiCacheStorage, space: KeySpace, page_hash: str) -> bytes | None:
    """Return a page of one member, right or wrong, or None."""
    page = Page(bytearray(space.stored_nbytes))
    with suppress(HiCacheError):
        return page.tobytes() if storage.batch_get(space, [page_hash], [page]) == [True] else None
    return None


def _write(storage: HiCacheStorage, space: KeySpace, page_hash: str, data: bytes) -> None:
    with suppress(HiCacheError):
        storage.batch_set(space, [page_hash], [Page(bytearray(data))])


# --- KV-601: members that are down ---------------------------------------------------------------


@caught_by(
    "KV-601:reads_go_on_while_a_member_is_down",
    says="raised although a member had answered|misses a page",
    seen_in="a mirror without a degraded mode",
)
class RaisesIfOneIsDown(Tiered):
    """A call raises as soon as one member does."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for part in self.parts().values():
            part.batch_exists(space, hashes)
        return super().batch_get(space, hashes, pages)


@caught_by("KV-601:reads_go_on_while_a_member_is_down", says="is not used again")
class NeverAsksAgain(Striped):
    """A member that has failed once is never asked again."""

    _lost: set[str] = own(set)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        hits = super().batch_get(space, hashes, pages)
        for name, part in self.parts().items():
            try:
                there = part.batch_exists(space, hashes)
            except HiCacheError:
                self._lost.add(name)
                continue
            if name in self._lost:
                hits = [hit and not one for hit, one in zip(hits, there, strict=True)]
        return hits


@caught_by("KV-601:sets_go_on_while_a_member_is_down", says="no page can be stored")
class SetsNeedEachMember(Tiered):
    """A set is refused while any member is down."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        try:
            for part in self.parts().values():
                part.batch_exists(space, hashes)
        except HiCacheError:
            return [False] * len(hashes)
        return super().batch_set(space, hashes, pages)


@caught_by("KV-601:without_any_member_calls_raise", says="answers although no member does")
class MissesWithoutMembers(Tiered):
    """If no member answers, pages are reported as misses."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        with suppress(StorageUnavailable, StorageTimeout):
            return super().batch_exists(space, hashes)
        return [False] * len(hashes)


# --- KV-602: members that hang -------------------------------------------------------------------


@caught_by("KV-602:a_hung_member_delays_a_call_by_its_limit", says="the call hangs")
class AsksUntilItAnswers(Tiered):
    """A call tries a member that does not answer again and again."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for part in self.parts().values():
            for _ in range(50):
                try:
                    part.batch_exists(space, hashes)
                    break
                except StorageTimeout:
                    continue
        return super().batch_get(space, hashes, pages)


@caught_by("KV-602:a_hung_member_delays_a_call_by_its_limit", says="misses a page")
class LosesAllBehindAHungMember(Tiered):
    """If one member does not answer in time, the whole call is a miss."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        try:
            for part in self.parts().values():
                part.batch_exists(space, hashes)
        except StorageTimeout:
            return [False] * len(hashes)
        return super().batch_exists(space, hashes)


@caught_by("KV-602:a_member_without_a_limit_is_left_behind", says="the call hangs")
class WaitsForEver(Tiered):
    """A call waits for each member, however long that takes."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        for part in self.parts().values():
            part.batch_exists(space, hashes)
        return super().batch_exists(space, hashes)


@caught_by("KV-602:calls_that_hang_take_no_memory_from_others", says="misses a page")
class OneRoomForAll(Tiered):
    """The calls of all members share a few buffers, and those of a hung member keep theirs."""

    _buffers: threading.Semaphore = own(lambda: threading.Semaphore(_BUFFERS))

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        if not self._buffers.acquire(timeout=_BUFFER_WITHIN_S):
            return [False] * len(hashes)
        threading.Thread(target=self._read_ahead, args=(space, hashes), daemon=True).start()
        return super().batch_get(space, hashes, pages)

    def _read_ahead(self, space: KeySpace, hashes: Sequence[str]) -> None:
        for part in self.parts().values():
            _ask(part, space, hashes)
        self._buffers.release()


@caught_by("KV-602:calls_behind_a_hung_member_keep_nothing", says="keep threads or memory")
class AThreadForEachCall(Tiered):
    """Each call asks each member on a new thread, which stays until the member answers."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        for part in self.parts().values():
            threading.Thread(target=_ask, args=(part, space, hashes), daemon=True).start()
        return super().batch_exists(space, hashes)


def _ask(storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> None:
    with suppress(HiCacheError):
        storage.batch_exists(space, hashes)


@caught_by("KV-602:calls_behind_a_hung_member_keep_nothing", says="keep threads or memory")
class KeepsWhatItCouldNotWrite(Tiered):
    """Pages that a member did not take are kept in memory, without a limit."""

    _kept: list[bytes] = own(list)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._kept += [page.tobytes() for page in pages]
        return super().batch_set(space, hashes, pages)


# --- KV-603: members that refuse -----------------------------------------------------------------


@caught_by(
    "KV-603:a_set_is_true_only_if_a_member_stored_the_page",
    says="True for a page that no member has",
)
class TrueThoughAStripeRefused(Striped):
    """A set reports True for each page, without a look at the members' answers."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return [True for _ in super().batch_set(space, hashes, pages)]


@caught_by("KV-603:full_members_take_nothing", says="True for a page that no member has")
class TrueWhenNobodyStored(Tiered):
    """A set reports True for each page, because it will be written later."""

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return [True for _ in super().batch_set(space, hashes, pages)]


@caught_by(
    "KV-603:a_refused_page_never_arrives_late",
    "KV-603:a_refused_page_never_arrives_after_it_was_left_behind",
    says="shows a page whose set returned False",
)
class ForgetsItsDoubts(Tiered):
    """A page is a hit if any member has it, also if its set was refused and arrived late."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        there = super().batch_exists(space, hashes)
        for part in self.parts().values():
            with suppress(HiCacheError):
                found = part.batch_exists(space, hashes)
                there = [a or b for a, b in zip(there, found, strict=True)]
        return there


# --- KV-604: members that lost their pages -------------------------------------------------------


@caught_by("KV-604:pages_of_a_wiped_member_come_from_another_or_are_misses", says="shows a page")
class TrustsItsIndex(Striped):
    """What was once set is there, because an index in memory says so."""

    _known: set[str] = own(set)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        stored = super().batch_set(space, hashes, pages)
        self._known.update(h for h, ok in zip(hashes, stored, strict=True) if ok)
        return stored

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        there = super().batch_exists(space, hashes)
        return [a or h in self._known for a, h in zip(there, hashes, strict=True)]


@caught_by("KV-604:pages_of_a_wiped_member_can_be_set_again")
class SetsOnce(Striped):
    """A page that was set once is not set again."""

    _known: set[str] = own(set)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        new = [n for n, page_hash in enumerate(hashes) if page_hash not in self._known]
        stored = [True] * len(hashes)
        answers = super().batch_set(space, [hashes[n] for n in new], [pages[n] for n in new])
        for n, ok in zip(new, answers, strict=True):
            stored[n] = ok
            if ok:
                self._known.add(hashes[n])
        return stored


# --- KV-605: damaged members ---------------------------------------------------------------------


class _ReadsUnchecked(Tiered):
    """Serves each page from the first member that has it, right or wrong."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        return [self._get(space, *one) for one in zip(hashes, pages, strict=True)]

    def _get(self, space: KeySpace, page_hash: str, page: Page) -> bool:
        for level, part in enumerate(self.parts().values()):
            data = _read(part, space, page_hash)
            if data is not None:
                page.copy_from(data)
                self._promote(space, page_hash, data, level)
                return True
        return False

    def _promote(self, space: KeySpace, page_hash: str, data: bytes, level: int) -> None:
        """Do nothing."""


@caught_by("KV-605:damage_in_one_member_stays_there_and_heals")
class ServesTheFirstCopy(_ReadsUnchecked):
    """The first member that has a page serves it, so its damage hides whole copies, and costs them."""


@caught_by("KV-605:damage_costs_no_copy_that_is_out_of_reach", says="has cost the whole copies")
class DeletesLater(_ReadsUnchecked):
    """A delete that a member did not answer is made up for when it is back, also if damage caused it."""

    _due: list[tuple[HiCacheStorage, KeySpace, Sequence[str]]] = own(list)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self._due += [(part, space, list(hashes)) for part in self.parts().values()]
        return super().batch_delete(space, hashes)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        left = [one for one in self._due if not _is_deleted(*one)]
        self._due[:] = left
        return super().batch_get(space, hashes, pages)


def _is_deleted(storage: HiCacheStorage, space: KeySpace, hashes: Sequence[str]) -> bool:
    try:
        return all(storage.batch_delete(space, hashes))
    except HiCacheError:
        return False


@caught_by("KV-605:damage_in_one_member_stays_there_and_heals")
class PromotesDamagedPages(_ReadsUnchecked):
    """A page is copied to the members above before anybody has checked it."""

    def _promote(self, space: KeySpace, page_hash: str, data: bytes, level: int) -> None:
        for part in list(self.parts().values())[:level]:
            _write(part, space, page_hash, data)


@caught_by("KV-605:damage_in_one_member_stays_there_and_heals")
class DeletesEachCopy(Tiered):
    """If members disagree on a page, it is deleted from all of them."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        for page_hash in hashes:
            copies = {_read(part, space, page_hash) for part in self.parts().values()} - {None}
            if len(copies) > 1:
                super().batch_delete(space, [page_hash])
        return super().batch_get(space, hashes, pages)


@caught_by("KV-605:damage_in_each_member_counts_and_heals", says="not counted as corrupt")
class HidesDamage(Tiered):
    """A page that is damaged in each member is a plain miss, so nobody hears of it."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        hits = super().batch_get(space, hashes, pages)
        return [
            hit and not (space.frame_nbytes and page.tobytes()[-1:] != self._first_seen(one, page))
            for one, hit, page in zip(hashes, hits, pages, strict=True)
        ]

    _ends: dict[str, bytes] = own(dict)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self._ends.update((h, p.tobytes()[-1:]) for h, p in zip(hashes, pages, strict=True))
        return super().batch_set(space, hashes, pages)

    def _first_seen(self, page_hash: str, page: Page) -> bytes:
        return self._ends.get(page_hash, page.tobytes()[-1:])


# --- KV-606: removal -----------------------------------------------------------------------------


@caught_by(
    "KV-501:the_answers_about_a_page_fit_one_order",
    "KV-606:a_deleted_page_is_gone_from_every_member",
    says="that no order of their calls explains|a member has a page",
)
class DeletesFromTheFirst(Tiered):
    """A delete reaches the first member only."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return next(iter(self.parts().values())).batch_delete(space, hashes)


@caught_by("KV-606:a_delete_that_does_not_reach_a_member_is_false", says="a member has a page")
class TrueThoughOneIsDown(Tiered):
    """A delete is True if any member has deleted the page."""

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        return [True for _ in super().batch_delete(space, hashes)]


@caught_by("KV-606:a_removed_key_space_is_gone_from_every_member", says="a member has a page")
class ClearsTheFirst(Tiered):
    """A clear reaches the first member only."""

    def clear(self, space: KeySpace) -> int:
        return next(iter(self.parts().values())).clear(space)


@caught_by("KV-606:a_removed_key_space_is_gone_from_every_member", says="a member has a page")
class ClearsAroundAMember(Tiered):
    """A member that is down is left out of a clear."""

    def remove_space(self, space_id: str) -> int:
        removed = [0]
        for part in self.parts().values():
            with suppress(HiCacheError):
                removed.append(part.remove_space(space_id))
        return max(removed)


@caught_by(
    "KV-606:a_delete_reaches_copies_under_way",
    "KV-606:a_cleared_key_space_gets_no_copy_that_was_under_way",
    "KV-606:a_copy_that_begins_during_a_delete_does_not_stay",
    says="a member has a page",
)
class CopiesWithoutALook(Tiered):
    """Pages that were read are copied to the other members in the background, deleted or not."""

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        hits = super().batch_get(space, hashes, pages)
        copies = {h: p.tobytes() for h, p, hit in zip(hashes, pages, hits, strict=True) if hit}
        threading.Thread(target=self._copy, args=(space, copies), daemon=True).start()
        return hits

    def _copy(self, space: KeySpace, copies: dict[str, bytes]) -> None:
        for part in self.parts().values():
            for page_hash, data in copies.items():
                _write(part, space, page_hash, data)


# --- KV-607: listings ----------------------------------------------------------------------------


@caught_by("KV-607:a_listing_has_each_page_once", says="come more than once")
class ListsEachCopy(Tiered):
    """A scan lists a page once for each member that has it."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        return chain.from_iterable(part.scan(space) for part in self.parts().values())


@caught_by("KV-607:a_listing_without_a_member_is_an_error", says="leaves out a member")
class HidesAMember(Tiered):
    """A member that cannot be listed counts as empty."""

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        seen: set[str] = set()
        for part in self.parts().values():
            with suppress(HiCacheError):
                for info in part.scan(space):
                    if info.page_hash not in seen:
                        seen.add(info.page_hash)
                        yield info

"""KV-307: if disk or descriptors run out, a store refuses calls, and works again afterwards."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotVerified
from hicache_conformance.scenarios.attempts import Attempt, Caller, error_text, make_attempt
from hicache_conformance.scenarios.lifecycle_actors import receive_result, use
from hicache_conformance.scenarios.setup import no_files
from hicache_conformance.tools.content.content import content
from hicache_conformance.tools.observation.files import files_under
from hicache_conformance.tools.processes.resources import (
    ProcessResources,
    file_size_limit,
    no_free_descriptors,
    wait_until,
)
from hicache_storage.errors import HiCacheError
from hicache_storage.storage import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_conformance.case.case import Case
    from hicache_conformance.run.outcomes import Violation
    from hicache_conformance.tools.processes.child import Link
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 64 << 10
_LIMIT_S = 30.0
_TIDY_LIMIT_S = 5.0
"""A store may take this long to clean up in the background."""
_FEW, _MANY = 2, 12
"""How many pages are refused before the files are counted, and how many after."""


@check("KV-307", quick=False)
def a_disk_without_room_refuses_the_page(case: Case) -> None:
    """If files can't grow, a page is refused, nothing half-written shows, and later sets work.

    RLIMIT_FSIZE stands for the full disk: writes beyond the limit fail with EFBIG instead of
    ENOSPC.
    """
    _must_write_files(case)
    found = _run(case, _write_on_a_full_disk)
    case.evidence["sets on a full disk"] = f"{found} refused or failed"


@check("KV-307", quick=False)
def refused_pages_leave_no_debris(case: Case) -> None:
    """Pages that are refused because files can't grow leave no files and no bytes behind."""
    _must_write_files(case)
    found = _run(case, _count_debris)
    case.evidence["bytes left by pages that were refused"] = str(found)


@check("KV-307", quick=False)
def without_free_descriptors_nothing_breaks(case: Case) -> None:
    """If the process has no descriptor left, calls fail as the contract allows, and work again later."""
    _run(case, _run_out_of_descriptors)


def _must_write_files(case: Case) -> None:
    before = sum(files_under(case.scratch.path).values())
    probe, space = case.open(), case.space(_page_nbytes(case))
    probe.open_space(space)
    if not all(probe.set(space, case.contents(space, case.hashes(1)))):
        raise NotVerified(f"the store takes no page of {space.stored_nbytes} bytes")
    probe.close()  # A store that is not shared may allow only one handle at a time.
    if sum(files_under(case.scratch.path).values()) - before < space.stored_nbytes:
        raise no_files(case)


def _page_nbytes(case: Case) -> int:
    return min(_PAGE_NBYTES, case.claims.max_page_nbytes or _PAGE_NBYTES)


def _run(case: Case, actor: Callable[[Link, _Store], None]) -> Any:
    """Return the result of the actor. If it has none, raise `NotVerified` with the reason."""
    child = case.child(_with_store, actor, case.space(_page_nbytes(case)), str(case.scratch.path))
    found = receive_result(child)
    if isinstance(found, str):
        raise NotVerified(found)
    return found


def _with_store(
    link: Link, actor: Callable[[Link, _Store], None], space: KeySpace, directory: str
) -> None:
    """Actor: open the store and run `actor` on it, or send why it is of no use to the check."""
    store = _Store(link, space, directory)
    if store.takes_pages:
        actor(link, store)
    else:
        link.send("the store refuses pages although there is no shortage")


class _Store:
    """The store in a process that can run out of disk space or descriptors."""

    def __init__(self, link: Link, space: KeySpace, directory: str) -> None:
        self.before = ProcessResources.current()
        self.probe = link.open()
        self.space = space
        self.directory = Path(directory)
        self.caller = Caller(self.probe, space, _LIMIT_S)
        self.keeps = self.probe.storage.capabilities.retention is Retention.UNTIL_DELETED
        self._page_count = 0
        use(self.probe, space)  # The first calls import and start what the store needs.
        before = self.nbytes()
        self.earlier = self.contents(3)
        self.takes_pages = all(self.probe.set(space, self.earlier))
        self.writes_files = self.nbytes() - before >= space.stored_nbytes

    def contents(self, count: int, space: KeySpace | None = None) -> dict[str, bytes]:
        """Return `count` new pages."""
        self._page_count += count
        numbers = range(self._page_count - count, self._page_count)
        hashes = [f"{os.getpid():032x}{number:032x}" for number in numbers]
        space = space or self.space
        return {one: content(space.id, one, space.stored_nbytes) for one in hashes}

    def nbytes(self) -> int:
        """Return the size of all files in the store's directory, in bytes."""
        return sum(files_under(self.directory).values())

    def violation(
        self, message: str, attempt: Attempt | None = None, *, expected: str
    ) -> Violation:
        return self.probe.violation(message, expected=expected, got=attempt.text if attempt else "")

    def must_be_intact(self, pages: Mapping[str, bytes], when: str, *, there: bool) -> None:
        """Raise if a read gives wrong bytes, a foreign exception or, if `there`, a miss."""
        for page_hash, data in pages.items():
            found = self.caller.get([page_hash])
            self.must_not_be_foreign(found, when)
            if found.error is None and found.answer not in ([data], [None]):
                raise self.violation(
                    f"batch_get is True with wrong bytes {when}",
                    expected="the bytes that were set, or a miss",
                )
            if there and self.keeps and found.answer != [data]:
                raise self.violation(
                    f"a page that was set can't be read {when}", found, expected="its bytes"
                )

    def must_not_be_foreign(self, attempt: Attempt, when: str) -> None:
        """Raise if a call raised an exception that the contract does not allow."""
        if attempt.error is not None and not attempt.failed_by_contract:
            raise self.violation(
                f"{attempt.operation} raised {type(attempt.error).__name__} {when}",
                attempt,
                expected="False for that page, or StorageUnavailable",
            )

    def must_work_again(self, pages: Mapping[str, bytes], when: str) -> None:
        """Raise unless sets of these pages soon succeed."""
        last: list[Attempt] = []

        def all_are_taken() -> bool:
            last[:] = [self.caller.set({one: data}) for one, data in pages.items()]
            return all(attempt.answer == [True] for attempt in last)

        if not wait_until(all_are_taken, _LIMIT_S / 2):
            failed = next(attempt for attempt in last if attempt.answer != [True])
            raise self.violation(f"sets do not work again {when}", failed, expected="True")
        self.must_be_intact(pages, when, there=True)


def _write_on_a_full_disk(link: Link, store: _Store) -> None:
    """Actor: send how many sets did not succeed, at several limits on the size of files."""
    together = min(2, store.probe.most_pages(store.space))
    refused = 0
    for limit in _limits(store):
        pages = store.contents(2)
        batch = store.contents(together)
        when = f"when no file may be longer than {limit} bytes"
        with file_size_limit(limit):
            attempts = [store.caller.set({one: data}) for one, data in pages.items()]
            batch_attempt = store.caller.set(batch)
            for one in (*attempts, batch_attempt, *_other_calls(store, limit)):
                store.must_not_be_foreign(one, when)
            store.must_be_intact(store.earlier, when, there=True)
        for one, page in zip(attempts, _one_by_one(pages), strict=True):
            _must_match_answer(store, one.answer, page, when)
            refused += one.answer != [True]
        verdicts = batch_attempt.answer or [None] * together
        for verdict, page in zip(verdicts, _one_by_one(batch), strict=True):
            _must_match_answer(store, None if verdict is None else [verdict], page, when)
        store.must_be_intact(store.earlier, "after the disk was full", there=True)
        store.must_work_again(pages, "after the disk was full")
        _must_accept_later(store, limit)
    store.probe.close()
    link.send(refused)


def _other_calls(store: _Store, limit: int) -> list[Attempt]:
    """Make other calls on a full disk: set present pages, delete, open a new key space."""
    elsewhere = _elsewhere(store, limit)
    return [
        *(store.caller.set({one: data}) for one, data in store.earlier.items()),
        store.caller.delete(["0" * 64]),
        elsewhere.open_space(),
        elsewhere.exists(["0" * 64]),
    ]


def _elsewhere(store: _Store, limit: int) -> Caller:
    """Return a caller for a key space that is first used while no file may exceed `limit` bytes."""
    tenant = f"{store.space.tenant}-{limit}"
    return Caller(store.probe, replace(store.space, tenant=tenant), _LIMIT_S)


def _must_accept_later(store: _Store, limit: int) -> None:
    """Raise if a key space that was opened on a full disk accepts no pages afterwards."""
    elsewhere = _elsewhere(store, limit)
    pages = store.contents(1, elsewhere.space)
    attempts = [elsewhere.open_space()]

    def is_taken() -> bool:
        attempts[:] = [elsewhere.open_space(), elsewhere.set(pages)]
        return bool(attempts[-1].answer == [True])

    if not wait_until(is_taken, _LIMIT_S / 2):
        raise store.violation(
            "a key space that was opened when the disk was full takes no pages afterwards",
            attempts[-1],
            expected="True",
        )
    elsewhere.delete(list(pages))


def _one_by_one(pages: Mapping[str, bytes]) -> list[dict[str, bytes]]:
    return [{page_hash: data} for page_hash, data in pages.items()]


def _must_match_answer(
    store: _Store, answer: list[bool] | None, page: Mapping[str, bytes], when: str
) -> None:
    """Raise if a page contradicts the answer of its set. The answer is None if the set raised."""
    if answer == [False]:
        seen = store.caller.exists(list(page))
        found = store.caller.get(list(page))
        if seen.answer == [True] or found.answer not in ([None], None):
            raise store.violation(
                f"a page is there although its batch_set returned False {when}",
                seen,
                expected="a miss: a refused page never becomes visible",
            )
    then = f"after a set that returned {answer} {when}" if answer else f"after a set {when}"
    store.must_be_intact(page, then, there=answer == [True])


def _count_debris(link: Link, store: _Store) -> None:
    """Actor: send how many bytes refused pages have added to the files."""
    page_nbytes = store.space.stored_nbytes
    with file_size_limit(page_nbytes // 2):
        answers = [store.caller.set(store.contents(1)).answer for _ in range(_FEW)]
        before = files_under(store.directory)
        answers += [store.caller.set(store.contents(1)).answer for _ in range(_MANY)]
    if [True] in answers:
        link.send("the store stores pages although no file may grow")
        return
    now: dict[Path, int] = {}

    def is_tidy() -> bool:
        now.clear()
        now.update(files_under(store.directory))
        grown = sum(now.values()) - sum(before.values())
        return grown <= page_nbytes and len(now) - len(before) < _MANY // 2

    if not wait_until(is_tidy, _TIDY_LIMIT_S):
        more = sorted(path.name for path in now.keys() - before.keys())
        raise store.violation(
            f"{_MANY} pages that were refused left {len(now) - len(before)} files and"
            f" {sum(now.values()) - sum(before.values())} bytes",
            expected=f"nothing that grows with what is refused; there are now {', '.join(more[:3])}",
        )
    store.probe.close()
    link.send(sum(now.values()) - sum(before.values()))


def _run_out_of_descriptors(link: Link, store: _Store) -> None:
    """Actor: send True, or the reason why the check does not apply."""
    if not store.writes_files and not ProcessResources.current().added_since(store.before):
        link.send("the store holds no descriptor and writes no files")
        return
    when = "when the process has no descriptor left"
    pages = store.contents(1)
    calls: list[Callable[[], Attempt]] = [
        partial(store.caller.exists, list(store.earlier)[:1]),
        partial(store.caller.get, list(store.earlier)[:1]),
        partial(store.caller.set, pages),
        partial(store.caller.delete, ["0" * 64]),
    ]
    with no_free_descriptors():
        for call in calls * 2:
            store.must_not_be_foreign(call(), when)
        opened = make_attempt(store.probe, "from_config", link.open_storage, limit_s=_LIMIT_S)
        if opened.error is None:
            opened.answer.close()
        elif not isinstance(opened.error, HiCacheError):
            raise store.violation(
                f"from_config raised {type(opened.error).__name__} {when}",
                opened,
                expected=f"StorageUnavailable, from {error_text(opened.error)}",
            )
    store.must_be_intact(store.earlier, "when there are descriptors again", there=True)
    store.must_work_again(pages, "when there are descriptors again")
    store.probe.close()
    link.send(True)


def _limits(store: _Store) -> list[int]:
    """Return file sizes that are too small for one more page, in a file of its own or a shared one."""
    page = store.space.stored_nbytes
    largest = max(files_under(store.directory).values())
    limits = {0, 1, page // 2, page - 1, largest - 1, largest + page // 2}
    return sorted(limits)

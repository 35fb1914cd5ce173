"""KV-007, KV-103, KV-202: directories in which a store may neither make nor remove files."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import Caller, make_attempt
from hicache_conformance.scenarios.setup import no_files, open_store
from hicache_conformance.tools.observation.files import files_under
from hicache_conformance.tools.processes.resources import unwritable

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_PAGE_NBYTES = 4096
_PAGES = 16
_LIMIT_S = 30.0


@check("KV-103", Need.ENUMERABLE)
def a_clear_that_may_not_remove_files_says_so(case: Case) -> None:
    """If a store may not remove its files, clear raises unless it has removed every page."""
    store, space, pages, directories = _stored_in_files(case)
    with unwritable(directories):
        call = partial(store.storage.clear, space)
        attempt = make_attempt(store, "clear", call, limit_s=_LIMIT_S)
    left = sum(store.exists(space, list(pages)))
    if attempt.error is None and left:
        raise store.violation(
            f"clear returned {attempt.answer}, and {left} of {_PAGES} pages are still there, whose"
            " files the store could not remove",
            expected="an exception, or a key space without a page",
            got=f"{attempt.answer}, and {left} pages",
            sequence=case.trace.sequence("clear"),
        )


@check("KV-007")
def a_page_whose_file_stays_is_not_deleted(case: Case) -> None:
    """If a store may not remove its files, a delete is True only for pages that are gone."""
    store, space, pages, directories = _stored_in_files(case)
    caller = Caller(store, space, _LIMIT_S)
    with unwritable(directories):
        attempt = caller.delete(list(pages))
    verdicts: list[bool] = attempt.answer or []
    deleted = [one for one, ok in zip(pages, verdicts, strict=False) if ok]
    case.must_miss(store, space, deleted, "was deleted: batch_delete returned True")


@check("KV-202")
def a_page_whose_file_cannot_be_made_changes_no_other(case: Case) -> None:
    """If a store may make files in some of its directories only, each verdict is true of its page."""
    store, space, pages, directories = _stored_in_files(case)
    store.delete(space, list(pages))
    left = [each for each in directories if each.exists()]
    with unwritable(left[::2]):
        attempt = Caller(store, space, _LIMIT_S).set(pages)
    if attempt.error is not None:
        return  # Other checks judge exceptions.
    taken = {one: pages[one] for one, ok in zip(pages, attempt.answer, strict=True) if ok}
    case.evidence["pages that could be written"] = f"{len(taken)} of {_PAGES}"
    refused = [one for one in pages if one not in taken]
    case.must_miss(store, space, refused, "could not be written: batch_set returned False")
    case.must_hold(store, space, taken)


def _stored_in_files(case: Case) -> tuple[Probe, KeySpace, dict[str, bytes], list[Path]]:
    """Store pages. Return them, and the directories of all files that are as large as a page."""
    store, space = open_store(case, _PAGE_NBYTES)
    pages = case.stored(store, space, _PAGES)
    files = files_under(case.scratch.path).items()
    found = {path.parent for path, nbytes in files if nbytes >= space.stored_nbytes}
    if not found:
        raise no_files(case)
    return store, space, pages, sorted(found)

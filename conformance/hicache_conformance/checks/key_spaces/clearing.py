"""KV-103: clear removes the pages of its own key space, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.run.subject import Scratch
from hicache_conformance.scenarios.key_space_neighbours import neighbours, rich_space, similar_ids
from hicache_conformance.scenarios.setup import (
    another_handle,
    fitting,
    note,
    open_and_set,
    open_store,
    store_many,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hicache_conformance.case.case import Case
    from hicache_conformance.case.probe import Probe
    from hicache_storage.keys import KeySpace

_SAMPLE = 64


@check("KV-103", Need.ENUMERABLE)
def clear_removes_every_page(case: Case) -> None:
    """After clear a key space is empty, however many pages it held."""
    store = case.open()
    for count in (1, 2, 130 if case.quick else 2100):
        space = case.space(fitting(case, 64), tenant=f"clear{count}")
        store.open_space(space)
        pages = list(store_many(case, store, space, count))
        removed = store.clear(space)
        left = store.scan(space)
        if left:
            raise store.violation(
                f"clear left {len(left)} of {len(pages)} pages",
                expected="an empty key space",
                got=f"scan lists {left[0].page_hash[:8]} and others",
            )
        case.must_miss(store, space, pages[:_SAMPLE] + pages[-_SAMPLE:], "was cleared")
        _must_have_counted(case, store, removed, len(pages), "that many were set, and all are gone")


@check("KV-103")
def clear_counts_the_pages_that_it_removed(case: Case) -> None:
    """Clear counts every page that it removed once, and no page that was deleted before."""
    store, space = open_store(case, 64)
    _must_count(case, store, space, 0, "no page was set")
    pages = case.stored(store, space, 9)
    case.must_set(store, space, dict(list(pages.items())[:3]))
    store.delete(space, list(pages)[4:6])
    _must_count(case, store, space, 7, "nine pages were set, three of them twice, and two deleted")
    _must_count(case, store, space, 0, "it had just been cleared")


@check("KV-103")
def a_cleared_space_starts_anew(case: Case) -> None:
    """After clear, a page can be set with new bytes, can be read, and can be cleared again."""
    store, space = open_store(case, 200)
    hashes = case.hashes(5)
    for version in range(3):
        pages = case.contents(space, hashes, version)
        case.must_set(store, space, pages)
        with note(f"set after {version} clears"):
            case.must_hold(store, space, pages)
            _must_count(case, store, space, len(pages), "five pages were set")
            case.must_miss(store, space, hashes, "was cleared")
    store.open_space(space)
    case.must_miss(store, space, hashes, "was cleared before the key space was opened again")


@check("KV-103")
def clear_spares_neighbours(case: Case) -> None:
    """Clearing a key space leaves all others, even if they differ from it in only one field."""
    store = case.open()
    whole = fitting(case, 256)
    base = rich_space(case.space(whole - whole // 4, frame_nbytes=whole // 4))
    others = {one.difference: one.space for one in neighbours(base, quick=case.quick)}
    _must_leave(case, store, base, others)


@check("KV-103")
def clear_spares_look_alikes(case: Case) -> None:
    """Clear leaves key spaces whose id or model only begins with its own, or matches it as a pattern."""
    store = case.open()
    space = case.space(fitting(case, 64))
    for description, one, other in similar_ids(space, 4):
        _must_leave(case, store, one, {description: other})
    models = {
        end: case.space(space.page_nbytes, model=f"{space.model}{end}")
        for end in ("a", "ab", "/a", "-a", " a", ".a", "_a", "A")
    }
    for end in ("", "*", "?", "[ab]", "%", "_", ".*", "a*"):
        cleared = case.space(space.page_nbytes, model=f"{space.model}{end}")
        others = {f"model ...{other}, not ...{end}": one for other, one in models.items()}
        _must_leave(case, store, cleared, others)


@check("KV-103")
def clear_spares_another_stores_pages(case: Case) -> None:
    """Clearing a key space leaves the same key space in a store with another config."""
    own, others = case.config, dict(case.subject.config(case.new_scratch()))
    if own == others:
        raise NotDeclared("every store of this test has the same config")
    store, other = case.open(own), case.open(others, label="other")
    space = case.space(fitting(case, 64))
    store.open_space(space)
    other.open_space(space)
    pages = case.stored(store, space, 3)
    if any(other.exists(space, list(pages))):
        raise NotDeclared("the configs of two tests name one store")
    case.must_set(other, space, pages)
    store.clear(space)
    with note("the same key space was cleared in a store with another config"):
        case.must_hold(other, space, pages)


@check("KV-103")
def clear_spares_other_programs_files(case: Case) -> None:
    """Clear leaves files that are not the store's, both in its directory and next to it."""
    outer = case.new_scratch()
    inner = Scratch(outer.path / "caches" / "store", outer.prefix)
    inner.path.mkdir(parents=True)
    config = dict(case.subject.config(inner))
    store = case.open(config)
    space, other = case.space(fitting(case, 64)), case.space(fitting(case, 64), pool="draft")
    hashes = case.hashes(3)
    for one in (space, other):
        open_and_set(case, store, one, *hashes)
    if not any(inner.path.iterdir()):
        raise NotDeclared("the store keeps nothing in the test's directory")
    foreign_exception = _foreign_files(inner.path, case.hashes(1)[0])
    removed = store.clear(space)
    _must_be_untouched(
        store, foreign_exception, "clear removed or changed a file that is not the store's"
    )
    _must_have_counted(case, store, removed, len(hashes), "three pages were set")
    case.must_hold(store, other, case.contents(other, hashes))
    store.close()
    again = case.open(config, label="reopened")
    again.open_space(space)
    again.clear(space)
    _must_be_untouched(again, foreign_exception, "reopening and clearing removed or changed a file")


@check("KV-103", Need.SHARED)
def clear_reaches_other_handles(case: Case) -> None:
    """After one handle cleared, pages are gone for another handle that had read them before."""
    store, other = case.open(), case.open(label="other")
    space = case.space(fitting(case, 128))
    for one in (store, other):
        one.open_space(space)
    pages = case.stored(store, space, 5)
    case.must_hold(other, space, pages)
    store.clear(space)
    case.must_miss(other, space, list(pages), "another handle cleared")
    again = case.stored(store, space, 2)
    with note("set by one handle after it had cleared the key space, read by another"):
        case.must_hold(other, space, again)


@check("KV-103")
def another_handle_clears_what_the_first_set(case: Case) -> None:
    """A handle clears, and counts, pages that another handle has set."""
    store, space = open_store(case, 128)
    pages = case.stored(store, space, 5)
    again = another_handle(case, store)
    again.open_space(space)
    _must_count(case, again, space, len(pages), "five pages were set by another handle")
    case.must_miss(again, space, list(pages), "was cleared")


@check("KV-103")
def what_was_cleared_stays_cleared(case: Case) -> None:
    """After reopening, cleared pages are still gone, and pages that were set later are there."""
    store, space = open_store(case, 128)
    deleted = case.stored(store, space, 4)
    store.clear(space)
    later = case.stored(store, space, 2)
    again = another_handle(case, store)
    again.open_space(space)
    case.must_miss(again, space, list(deleted), "was cleared before the store was reopened")
    case.must_hold(again, space, later)


def _must_count(case: Case, store: Probe, space: KeySpace, pages: int, why: str) -> None:
    """Clear a key space. It must return the number of pages, or fewer if the store may lose pages."""
    _must_have_counted(case, store, store.clear(space), pages, why)


def _must_have_counted(case: Case, store: Probe, answer: int, pages: int, why: str) -> None:
    right = range(pages if case.keeps else 0, pages + 1)
    if answer not in right:
        raise store.violation(
            "clear does not return the number of pages that it removed",
            expected=f"{'' if case.keeps else 'at most '}{pages}: {why}",
            got=repr(answer),
        )


def _must_leave(
    case: Case, store: Probe, cleared: KeySpace, others: Mapping[str, KeySpace]
) -> None:
    """Clear one key space. The page that has the same hash in each other key space must stay."""
    (page_hash,) = case.hashes(1)
    for space in (cleared, *others.values()):
        open_and_set(case, store, space, page_hash)
    store.clear(cleared)
    case.must_miss(store, cleared, [page_hash], "was cleared")
    for description, space in others.items():
        with note(f"after a key space was cleared that differs from its own: {description}"):
            case.must_hold(store, space, case.contents(space, [page_hash]))


def _foreign_files(root: Path, page_hash: str) -> dict[Path, bytes]:
    """Write files of other programs in and around a directory. One of them has the name of a page."""
    parent = root.parent
    paths = (
        root / "README.md",
        root / ".hidden",
        root / "download.tmp",
        root / "archive" / ".unfinished.tmp",
        root / page_hash,
        root / "notes" / "today.txt",
        root / "archive" / page_hash,
        parent / "another-cache.bin",
        parent / f"{root.name}-old" / page_hash,
        parent / f"{root.name}.bak" / "manifest.json",
        parent.parent / "unrelated.txt",
    )
    files = {path: f"not yours: {path.name}\n".encode() for path in paths}
    for path, data in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return files


def _must_be_untouched(store: Probe, files: Mapping[Path, bytes], message: str) -> None:
    for path, data in files.items():
        now = path.read_bytes() if path.is_file() else None
        if now != data:
            raise store.violation(
                message,
                expected=f"{path} as another program left it",
                got="it is gone" if now is None else f"{len(now)} other bytes",
            )

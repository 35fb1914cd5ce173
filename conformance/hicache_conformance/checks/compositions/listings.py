"""KV-607: the listings of a composition."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.attempts import make_attempt
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import Trouble

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.composition import Composition

_POSITIONS = range(3)
_TROUBLES = (Trouble.DOWN, Trouble.HUNG)


@check("KV-607", Need.ENUMERABLE)
def a_listing_has_each_page_once(case: Case) -> None:
    """`scan` has each page that any member has, once, and `spaces` each key space."""
    for wiped in (None, *_POSITIONS):
        with composed(case) as one:
            pages = one.stored()
            if wiped is not None:
                one.members[wiped].wipe()
            there = {h for h in pages if one.holders(h)}
            _must_list_once(
                one, "scan", [info.page_hash for info in one.probe.scan(one.space)], there
            )
            if there:
                _must_list_once(one, "spaces", one.probe.spaces(), {one.space})


@check("KV-607", Need.ENUMERABLE)
def a_listing_without_a_member_is_an_error(case: Case) -> None:
    """If a member cannot be listed, `scan` and `spaces` raise, and do not leave out its pages."""
    for trouble in _TROUBLES:
        for position in _POSITIONS:
            with composed(case) as one:
                pages = one.stored()
                member = one.members[position]
                for each in one.members:
                    if each is not member:
                        each.wipe()
                member.fail(trouble, operations=("scan", "spaces"))
                there = {h for h in pages if one.holders(h)}
                with note(f"member {member.name!r} {trouble.value}"):
                    _must_raise_or_list(one, there)


def _must_list_once(
    one: Composition, operation: str, listed: Iterable[Hashable], expected: Collection[Hashable]
) -> None:
    counts = Counter(listed)
    twice = sum(count > 1 for count in counts.values())
    if twice or counts.keys() != set(expected):
        raise one.violation(
            f"{operation} does not list what the members have, each once",
            f"{len(expected)}, each once",
            f"{len(counts)}, of which {twice} come more than once",
        )


def _must_raise_or_list(one: Composition, there: set[str]) -> None:
    storage, space = one.probe.storage, one.space
    calls: dict[str, tuple[Callable[[], set[Any]], set[Any]]] = {
        "scan": (lambda: {info.page_hash for info in storage.scan(space)}, there),
        "spaces": (lambda: set(storage.spaces()), {space} if there else set()),
    }
    for operation, (call, expected) in calls.items():
        attempt = make_attempt(one.probe, operation, call, limit_s=one.caller.limit_s)
        if attempt.error is None and not expected <= attempt.answer:
            raise one.violation(
                f"{operation} leaves out a member that it cannot list",
                "StorageUnavailable or StorageTimeout",
                f"{len(attempt.answer)} of {len(expected)}, and no error",
            )
        if attempt.error is not None and not attempt.failed_by_contract:
            raise one.violation(
                f"{operation} raised an error that the contract does not name",
                "StorageUnavailable or StorageTimeout",
                attempt.text,
            )

"""KV-604: a member of a composition that has lost all of its pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.setup import note

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case

_POSITIONS = range(3)


@check("KV-604")
def pages_of_a_wiped_member_come_from_another_or_are_misses(case: Case) -> None:
    """If a member was wiped, its pages are hits from another member, or misses, and never wrong."""
    for position in _POSITIONS:
        with composed(case) as one:
            pages = one.stored()
            one.members[position].wipe()
            lost = [h for h in pages if not one.holders(h)]
            with note(f"member {one.members[position].name!r} was wiped"):
                one.must_serve(pages)
                one.must_hide(lost, "that no member has")


@check("KV-604")
def pages_of_a_wiped_member_can_be_set_again(case: Case) -> None:
    """If members were wiped, pages can be set again, and are hits."""
    for wiped in ((0,), (1,), (2,), tuple(_POSITIONS)):
        with composed(case) as one:
            pages = one.stored()
            for position in wiped:
                one.members[position].wipe()
            with note(f"members at {', '.join(map(str, wiped))} were wiped"):
                case.must_set(one.probe, one.space, pages)
                case.must_hold(one.probe, one.space, pages)
                unheld = [h for h in pages if not one.holders(h)]
                if unheld:
                    raise one.violation(
                        "batch_set is True, but no member has stored the page again",
                        "the page in some member",
                        f"none has {unheld[0][:8]}",
                        unheld[0],
                    )

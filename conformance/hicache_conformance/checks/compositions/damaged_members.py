"""KV-605: a member of a composition whose pages are damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.scenarios.composition import composed
from hicache_conformance.scenarios.fault_path import RECOVERY_LIMIT_S
from hicache_conformance.scenarios.framed_store import FramedStore, framed_space
from hicache_conformance.scenarios.setup import note
from hicache_conformance.tools.composition.members import Trouble
from hicache_conformance.tools.processes.resources import wait_until
from hicache_storage.page_store.results import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.case.case import Case
    from hicache_conformance.scenarios.composition import Composition
    from hicache_conformance.tools.composition.members import Member

_POSITIONS = range(3)
_NBYTES = 1000
_WRONG = {Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE}


@check("KV-605")
def damage_in_one_member_stays_there_and_heals(case: Case) -> None:
    """A page that one member has damaged is a hit if another has it whole; no other copy suffers."""
    for position in _POSITIONS:
        for above in {0, position}:
            with composed(case) as one:
                store, payloads, stored = _saved(one)
                member = one.members[position]
                for each in one.members[:above]:
                    each.wipe()
                whole = one.whole_elsewhere(stored, member)
                having = {h: one.holders(h, but=member) for h in stored}
                _damage(one, member, stored)
                fact = f"member {member.name!r} has damaged pages"
                with note(f"{fact}, and those above it are empty" if above else fact):
                    verdicts = store.load(payloads)
                    one.settle()
                    _must_be_hits(one, verdicts, whole)
                    _must_not_spread(one, member, stored, having)
                    _must_be_hits(one, store.load(payloads), whole)
                    store.save(payloads)
                    one.settle()
                    _must_be_hits(one, store.load(payloads), set(payloads))


@check("KV-605")
def damage_in_each_member_counts_and_heals(case: Case) -> None:
    """A page that each member has damaged is no hit, counts as corrupt, and the next save heals it."""
    with composed(case) as one:
        store, payloads, stored = _saved(one)
        for member in one.members:
            _damage(one, member, stored)
        verdicts = store.load(payloads)
        uncounted = [h for h, verdict in verdicts.items() if verdict not in _WRONG]
        if uncounted or store.corrupt_count() != len(payloads):
            raise one.violation(
                "a page that each member has damaged is not counted as corrupt",
                f"{len(payloads)} corrupt pages",
                f"{store.corrupt_count()} are counted, and {len(uncounted)} have another verdict",
            )
        store.save(payloads)
        one.settle()
        _must_be_hits(one, store.load(payloads), set(payloads))


@check("KV-605")
def damage_costs_no_copy_that_is_out_of_reach(case: Case) -> None:
    """If the members that have a page whole are down, damage in another is a miss only until then."""
    tried = 0
    for position in _POSITIONS:
        with composed(case) as one:
            store, payloads, stored = _saved(one)
            member = one.members[position]
            whole = one.whole_elsewhere(stored, member)
            damaged = {h for h in stored if member.has(one.space, h)}
            _damage(one, member, stored)
            for each in one.members:
                if each is not member:
                    each.fail(Trouble.DOWN)
            with note(f"member {member.name!r} has damaged pages, and the others are down"):
                verdicts = store.load(payloads)
                shown = [h for h in damaged if verdicts[h] is Verdict.OK]
                if shown:
                    raise one.violation("a damaged page is a hit", "a miss", shown[0][:8], shown[0])
            one.mend()
            tried += len(whole & damaged)

            def are_back() -> bool:
                verdicts = store.load(payloads)  # noqa: B023 - called in this turn
                return all(verdicts[h] is Verdict.OK for h in whole)  # noqa: B023 - as above

            if not wait_until(are_back, RECOVERY_LIMIT_S):
                raise one.violation(
                    "damage in one member has cost the whole copies of members that were down",
                    "hits once they are back",
                    f"misses for {RECOVERY_LIMIT_S:g} s",
                )
    if not tried:
        raise NotDeclared("the composition has each page in one member only")


def _saved(one: Composition) -> tuple[FramedStore, dict[str, bytes], dict[str, bytes]]:
    """Save new pages by a page store. Return it, the payloads, and the pages as members have them."""
    space = framed_space(one.case, _NBYTES)
    store = FramedStore(one.case, one.probe, space)
    payloads = one.case.contents(space, one.case.hashes(12))
    stored = store.save(payloads)
    one.space = store.stored_space
    one.settle()
    return store, payloads, stored


def _damage(one: Composition, member: Member, pages: Sequence[str] | Mapping[str, bytes]) -> None:
    for page_hash in pages:
        if member.has(one.space, page_hash):
            member.damage(one.space, page_hash)
    member.served.clear()


def _must_be_hits(one: Composition, verdicts: Mapping[str, Verdict], expected: set[str]) -> None:
    for page_hash in sorted(expected):
        if verdicts[page_hash] is not Verdict.OK:
            raise one.violation(
                "a page that a member has whole is no hit, because another has damaged it",
                "ok",
                f"{verdicts[page_hash].value} for {page_hash[:8]}",
                page_hash,
            )


def _must_not_spread(
    one: Composition,
    member: Member,
    stored: Mapping[str, bytes],
    having: Mapping[str, Sequence[Member]],
) -> None:
    """Assert that other members have whole pages, and the damaged one none that it has served."""
    for page_hash, data in stored.items():
        for each in one.members:
            found = each.read(one.space, page_hash)
            if each is member:
                is_right = page_hash not in member.served or found in (None, data)
            else:
                is_right = found == data if each in having[page_hash] else found in (None, data)
            if not is_right:
                kind = "still has the damaged page" if each is member else "has lost a whole page"
                if each is not member and found is not None:
                    kind = "has got a copy of a damaged page"
                raise one.violation(
                    f"member {each.name!r} {kind}",
                    "the damaged page healed or gone, and every other copy whole",
                    page_hash[:8],
                    page_hash,
                )

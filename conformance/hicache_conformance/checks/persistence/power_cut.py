"""KV-405: what a store that claims to survive power cuts has synced by the time a set returns True."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.rules import Need
from hicache_conformance.scenarios.fork_server import ForkServer
from hicache_conformance.scenarios.killed_writers import reopen
from hicache_conformance.scenarios.remote_storage import kill_after_next_call, open_remote, serve
from hicache_conformance.scenarios.setup import fitting, note

if TYPE_CHECKING:
    from hicache_conformance.case.case import Case
    from hicache_storage.keys import KeySpace

_CUTS = 2
_SIZES = (64, 5000, 300_000)


@check("KV-405", Need.CUT_POWER)
def synced_pages_survive_a_power_cut(case: Case) -> None:
    """Pages of several key spaces are there and whole after a power cut right after their sets."""
    spaces = [case.space(fitting(case, nbytes), tenant=f"of {nbytes} bytes") for nbytes in _SIZES]
    kept: dict[KeySpace, dict[str, bytes]] = {space: {} for space in spaces}
    fork_server = ForkServer(case)
    for _ in range(_CUTS):
        writer = open_remote(case, "killed later", fork_server.spawn(serve))
        for space in spaces:
            writer.open_space(space)
            if space is spaces[-1]:
                kill_after_next_call(writer)
            kept[space] |= case.stored(writer, space, min(2, writer.most_pages(space)))
        case.subject.cut_power()
        store = reopen(case)
        with note("the power was cut after its set had returned True"):
            for space, pages in kept.items():
                store.open_space(space)
                case.must_hold(store, space, pages)
        store.close()

"""Compositions of members that the kit controls, for its rules KV-6xx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance import Scratch

_LIMITS = {"timeout_s": 0.3, "lookup_timeout_s": 0.3, "breaker_cooldown_s": 0.2}


class Tiers:
    """`tiered` over the kit's members. Copies are made at once, so each rule can be tried."""

    write: ClassVar[str] = "through"

    def compose(self, scratch: Scratch, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        copies = {"write": self.write, "promote": "always", "copy_nbytes": "4MiB"}
        return {"tiers": list(members), **copies, **_LIMITS}


class Stripes:
    """`striped` over the kit's members."""

    def compose(self, scratch: Scratch, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"stripes": list(members), **_LIMITS}

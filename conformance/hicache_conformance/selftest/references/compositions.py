"""Right stores that consist of other stores: the compositions of this project, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hicache_conformance.run.subject import Scratch, Subject
from hicache_storage.registry import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.backend_support.wrapper import WrapperStorage
    from hicache_storage.storage import HiCacheStorage

    class Composed(WrapperStorage):
        """What type checkers know of a composition."""

        def parts(self) -> Mapping[str, HiCacheStorage]: ...

    Tiered = Composed
    Striped = Composed
else:
    Tiered, Striped = resolve("tiered")[0], resolve("striped")[0]

_LIMITS = {"timeout_s": 0.3, "lookup_timeout_s": 0.3, "breaker_cooldown_s": 0.2}
_MEMBERS = [{"name": name, "backend": "memory"} for name in ("a", "b")]


class TieredSubject(Subject):
    """Tiers that are written through, and get copies of all that is read."""

    storage_class: ClassVar[type[HiCacheStorage]] = Tiered
    write: ClassVar[str] = "through"

    def config(self, scratch: Scratch) -> Mapping[str, Any]:  # noqa: ARG002 - it is in memory
        return {"tiers": _MEMBERS}

    def compose(self, scratch: Scratch, members: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:  # noqa: ARG002 - as above
        copies = {"write": self.write, "promote": "always", "copy_nbytes": "4MiB"}
        return {"tiers": list(members), **copies, **_LIMITS}


class StripedSubject(Subject):
    """Stripes, each with its share of the pages."""

    storage_class: ClassVar[type[HiCacheStorage]] = Striped

    def config(self, scratch: Scratch) -> Mapping[str, Any]:  # noqa: ARG002 - it is in memory
        return {"stripes": _MEMBERS}

    def compose(self, scratch: Scratch, members: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:  # noqa: ARG002 - as above
        return {"stripes": list(members), **_LIMITS}

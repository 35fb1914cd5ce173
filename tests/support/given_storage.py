"""A storage that a test has made, for an adapter that opens storages by name.

STORAGES["mine"] = FaultyStorage(MemoryStorage())
config = given("mine")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from hicache_storage.storage import HiCacheStorage
from hicache_storage.testing import WrapperStorage

STORAGES: dict[str, HiCacheStorage] = {}


class GivenStorage(WrapperStorage):
    """A storage that passes every call on to the one that the config names, which stays open."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(STORAGES[config["name"]])

    def close(self) -> None:
        HiCacheStorage.close(self)


class BoundedStorage(GivenStorage):
    """A `GivenStorage` whose class declares that all calls end in time."""

    capabilities = HiCacheStorage.capabilities.__class__(bounded=True)

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        vars(self)["capabilities"] = type(self).capabilities


def given(name: str, class_name: str = "GivenStorage") -> dict[str, Any]:
    """Return the fields `backend` and `config` that open `STORAGES[name]`."""
    fields = {"backend_name": "given", "module_path": __name__, "class_name": class_name}
    return {"backend": "dynamic", "config": {**fields, "config": {"name": name}}}

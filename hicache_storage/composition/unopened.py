"""Stand for a store of a composition that could not be opened, so that the others can be looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

from hicache_storage.composition.claims import STRONGEST
from hicache_storage.errors import UnsupportedOperation
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.errors import StorageTimeout, StorageUnavailable
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import Capabilities


class UnopenedStorage(HiCacheStorage):
    """A storage whose every call raises the reason why it could not be opened."""

    capabilities: ClassVar[Capabilities] = STRONGEST
    """The widest claims. An instance claims what the storage would claim that it stands for."""
    usable_after_fork: ClassVar[bool] = True

    def __init__(
        self, error: StorageUnavailable | StorageTimeout, claims: Capabilities = STRONGEST
    ) -> None:
        self._error = error
        vars(self)["capabilities"] = claims

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:  # noqa: ARG003
        """Refuse, because it stands for another storage.

        Raises:
            UnsupportedOperation: Always.
        """
        raise UnsupportedOperation(f"{cls.__name__} has no config")

    def ensure_open(self) -> NoReturn:
        super().ensure_open()
        error = self._error
        raise type(error)(str(error), advice=error.advice) from error.__cause__

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self.ensure_open()

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self.ensure_open()

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        del space, hashes, pages
        self.ensure_open()

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        del space, hashes
        self.ensure_open()

    def parts(self) -> Mapping[str, HiCacheStorage]:
        """Return none: what it consists of is not known."""
        return {}

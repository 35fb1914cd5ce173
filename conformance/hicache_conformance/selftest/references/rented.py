"""A store under a name in a shared server, which limits each name but gives no figures of use."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from pydantic import field_validator

from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_protocol import Operation
from hicache_conformance.selftest.references.wire_settings import WireSettings
from hicache_storage.settings import ByteSize, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.keys import KeySpace
    from hicache_storage.storage import StorageStats


class RentedSettings(WireSettings):
    """The address, which may hold a user and a password, the name, and the room that the name has."""

    prefix: str = Field(pattern=r"^[a-z0-9]+$")
    capacity_nbytes: ByteSize | None = Field(default=None, gt=0)

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        super()._is_plain(f"wire://{parts.netloc.rpartition('@')[2]}")
        return url


class Rented(WireStore):
    """A store on a shared server, which refuses pages beyond the limit of the store's name."""

    _settings_class: ClassVar[type[WireSettings]] = RentedSettings
    _settings: RentedSettings

    def stats(self) -> StorageStats:
        """Return only the capacity, because the server alone can count how much of it is used."""
        return replace(super().stats(), capacity_nbytes=self._settings.capacity_nbytes)

    def _store(
        self, space: KeySpace, hashes: Sequence[str], contents: Sequence[bytes]
    ) -> list[bool]:
        verdicts = super()._store(space, hashes, contents)
        self._counters.add("refused", verdicts.count(False))
        return verdicts

    def _greet(self) -> None:
        limit = self._settings.capacity_nbytes
        if limit is None:
            super()._greet()
        else:
            super()._exchange(Operation.LIMIT, self._settings.prefix.encode(), str(limit).encode())

    def _exchange(self, operation: Operation, *parts: bytes) -> Sequence[bytes]:
        if operation is not Operation.PING:
            name = f"{self._settings.prefix}@".encode()
            parts = (name + b"".join(parts[:1]), *parts[1:])
        return super()._exchange(operation, *parts)

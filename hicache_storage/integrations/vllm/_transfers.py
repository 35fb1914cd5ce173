"""The loads and stores of vLLM that have not ended, and the meaning of their verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.page_store.results import Verdict
from hicache_storage.request_log import Reason

if TYPE_CHECKING:
    from hicache_storage.integrations._jobs import JobResult

_GONE = frozenset({Verdict.MISS, Verdict.CORRUPT, Verdict.WRONG_KEY, Verdict.WRONG_SIZE})
"""Verdicts of a load that mean the store does not have the page any more."""
_CONCLUDED = frozenset({Verdict.OK, Verdict.NOT_ADMITTED})
"""Verdicts of a store that has not failed."""


class Transfer(NamedTuple):
    """A load or a store of one request."""

    request: str
    keys: list[list[bytes]]
    """The keys of each batch."""

    @property
    def all_keys(self) -> list[bytes]:
        return [key for keys in self.keys for key in keys]

    def moved(self, result: JobResult) -> list[bytes]:
        """Return the keys of the pages that were loaded or stored."""
        return self._keys_with(result, frozenset({Verdict.OK}))

    def gone(self, result: JobResult) -> list[bytes]:
        """Return the keys of pages that the store does not have any more."""
        return self._keys_with(result, _GONE)

    def is_concluded(self, result: JobResult) -> bool:
        """Return whether every page was stored, or kept out of the store by `admission`."""
        return len(self._keys_with(result, _CONCLUDED)) == len(self.all_keys)

    def missing_reasons(self, result: JobResult) -> dict[bytes, Reason]:
        """Return the reason for each key that was not loaded."""
        return {
            key: Reason.of(verdict)
            for keys, found in zip(self.keys, result.verdicts, strict=True)
            for key, verdict in zip(keys, found, strict=True)
            if verdict is not Verdict.OK
        }

    def _keys_with(self, result: JobResult, verdicts: frozenset[Verdict]) -> list[bytes]:
        return [
            key
            for keys, found in zip(self.keys, result.verdicts, strict=True)
            for key, verdict in zip(keys, found, strict=True)
            if verdict in verdicts
        ]

"""The credentials that sign requests. A separate thread finds and refreshes them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import botocore.exceptions
from botocore.credentials import RefreshableCredentials

from hicache_storage.backend_support.single_flight import SingleFlight
from hicache_storage.errors import HiCacheError, StorageTimeout, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.s3.signing import FrozenKeys
    from hicache_storage.backend_support.deadline import Deadline

# If credentials expire sooner, botocore would refresh them on the calling thread.
_REFRESH_BEFORE_S = 15 * 60
_EXPIRY_MARGIN_S = 30
_RETRY_S = 20.0
"""The interval between refreshes while the old keys are valid."""


class Credentials(Protocol):
    """botocore's credentials: keys that botocore may refresh."""

    def get_frozen_credentials(self) -> FrozenKeys: ...


class CredentialCache:
    """The keys of one process. Thread-safe.

    Finding or refreshing keys may take network round trips or run a program, with botocore's time
    limits or with none. So it happens on a separate thread, one refresh at a time. Old keys are
    used until they expire.
    """

    def __init__(
        self, find: Callable[[], Credentials] | None, keys: FrozenKeys | None = None
    ) -> None:
        self.keys = keys
        """None: requests are not signed, or `refresh` was not called yet."""
        self._find = find
        self._credentials: Credentials | None = None
        self._is_invalid = False
        self._next_refresh_s = 0.0
        self._refreshing = SingleFlight("hicache-s3-credentials", self._load)

    def refresh(self, deadline: Deadline) -> None:
        """Make sure that `keys` are valid. Wait only if no valid keys are known.

        Raises:
            ConfigError: There are no credentials.
            StorageUnavailable, StorageTimeout: The issuer of the credentials fails.
        """
        if self._find is None or (self._are_valid_for(_REFRESH_BEFORE_S) and not self._is_invalid):
            return
        if self._are_valid_for(_EXPIRY_MARGIN_S):
            self._refresh_in_background()
            return
        refreshed = self._refreshing.wait(deadline.remaining_s())
        if refreshed is None:
            raise StorageTimeout(
                f"s3: the credentials were not renewed in time ({deadline.timeout_s:g} s):"
                " their issuer does not answer"
            )
        error = refreshed.exception()
        if isinstance(error, HiCacheError):
            raise error
        if error is not None:  # its text may contain the output of a program, or a token
            raise StorageUnavailable(
                f"s3: the credentials were not renewed ({_reason(error)}): check their issuer, the"
                " role or the program that the AWS configuration names"
            ) from None

    def invalidate(self) -> None:
        """Fetch the credentials again on a thread, because the store refused the current ones.

        They may have changed before they expired: a file was replaced, or the session of a role
        ended.
        """
        self._is_invalid = True

    # --- parts ---------------------------------------------------------------------------------------

    def _are_valid_for(self, duration_s: int) -> bool:
        credentials = self._credentials
        if credentials is None:
            return False
        if not isinstance(credentials, RefreshableCredentials):
            return True
        return not credentials.refresh_needed(refresh_in=duration_s)

    def _refresh_in_background(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_refresh_s:
            self._next_refresh_s = now_s + _RETRY_S
            with suppress(StorageUnavailable):  # no thread could start, but the old keys are valid
                self._refreshing.begin()

    def _load(self) -> None:
        assert self._find is not None
        credentials = self._credentials
        if credentials is None or self._is_invalid:
            credentials = self._find()
        self.keys = credentials.get_frozen_credentials()
        self._credentials = credentials
        self._is_invalid = False


def _reason(error: BaseException) -> str:
    """Return the exception's name, plus the names of the error and the operation if AWS gave them."""
    name = type(error).__name__
    if not isinstance(error, botocore.exceptions.ClientError):
        return name
    code = str(error.response.get("Error", {}).get("Code", ""))
    return f"{name}: {code} of {error.operation_name}" if code.isalnum() else name

"""The keys that requests are signed with: found, renewed and replaced beside the calls that use them."""

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

# From then on botocore renews credentials, on the thread that asks for them.
_OLD_S = 15 * 60
_SPENT_S = 30
_TRY_AGAIN_S = 20.0
"""How often new keys are asked for while there are old ones."""


class Credentials(Protocol):
    """What botocore finds: keys, and for temporary ones the way to new ones."""

    def get_frozen_credentials(self) -> FrozenKeys: ...


class Keyring:
    """The keys of one process, which whoever issued them may renew. Thread-safe.

    To find keys and to renew them may take network round trips or another program, with the time limits
    of botocore or with none. At most one such errand is under way. Old keys serve until they expire.
    """

    def __init__(
        self, find: Callable[[], Credentials] | None, keys: FrozenKeys | None = None
    ) -> None:
        self.keys = keys
        """None: requests are not signed, or `renew` was not called yet."""
        self._find = find
        self._credentials: Credentials | None = None
        self._is_doubted = False
        self._next_try_s = 0.0
        self._renewal = SingleFlight("hicache-s3-credentials", self._renewed)

    def renew(self, deadline: Deadline) -> None:
        """See to it that `keys` are good. Wait only where there are none that are.

        Raises:
            ConfigError: There are no credentials.
            StorageUnavailable, StorageTimeout: Who issues them does not.
        """
        if self._find is None or (self._are_good_for(_OLD_S) and not self._is_doubted):
            return
        if self._are_good_for(_SPENT_S):
            self._renew_beside()
            return
        renewal = self._renewal.wait(deadline.remaining_s())
        if renewal is None:
            raise StorageTimeout(
                f"s3: the credentials were not renewed in time ({deadline.timeout_s:g} s):"
                " who issues them does not answer"
            )
        error = renewal.exception()
        if isinstance(error, HiCacheError):
            raise error
        if error is not None:  # its text may hold what a program printed, or a token
            raise StorageUnavailable(
                f"s3: the credentials were not renewed ({_reason(error)}): check who issues them, the"
                " role or the program that the AWS configuration names"
            ) from None

    def doubt(self) -> None:
        """Have the credentials found anew, beside the calls: the store has refused them.

        A file may have been replaced, or a role's session ended, before the keys were to expire.
        """
        self._is_doubted = True

    # --- parts ---------------------------------------------------------------------------------------

    def _are_good_for(self, duration_s: int) -> bool:
        credentials = self._credentials
        if credentials is None:
            return False
        if not isinstance(credentials, RefreshableCredentials):
            return True
        return not credentials.refresh_needed(refresh_in=duration_s)

    def _renew_beside(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_try_s:
            self._next_try_s = now_s + _TRY_AGAIN_S
            with suppress(StorageUnavailable):  # no thread: the old keys are good
                self._renewal.begin()

    def _renewed(self) -> None:
        assert self._find is not None
        credentials = self._credentials
        if credentials is None or self._is_doubted:
            credentials = self._find()
        self.keys = credentials.get_frozen_credentials()
        self._credentials = credentials
        self._is_doubted = False


def _reason(error: BaseException) -> str:
    """Return the exception's name, with those of the error and the operation if AWS gave them."""
    name = type(error).__name__
    if not isinstance(error, botocore.exceptions.ClientError):
        return name
    code = str(error.response.get("Error", {}).get("Code", ""))
    return f"{name}: {code} of {error.operation_name}" if code.isalnum() else name

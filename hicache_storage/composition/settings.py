"""The config of a store inside a composition, and of the composition's time limits."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from hicache_storage.durations import parse_seconds
from hicache_storage.scalars import parse_float
from hicache_storage.settings import Field, PositiveSeconds, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

_LEAST = 2
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


class MemberSettings(Settings):
    """One store of a composition: its name there, its backend and its config."""

    name: str = Field(pattern=rf"^{_NAME.pattern}$", description="1 to 32 letters, digits, _ or -")
    """The name in messages, metrics and verbs."""
    backend: str
    """The name of its backend."""
    config: dict[str, Any] = Field(default_factory=dict, repr=False)
    """The config of its backend. It may contain secrets."""
    required: bool = False
    """True: if it does not answer, the composition does not open. By default it opens if any store
    answers, and takes the others in when they do."""


def _checked(members: list[MemberSettings]) -> list[MemberSettings]:
    if len(members) < _LEAST:
        raise ValueError("give at least two stores, because one needs no composition")
    names = [member.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two stores have the name {twice!r}: give each one of its own")
    return members


Members = Annotated[list[MemberSettings], AfterValidator(_checked)]
"""The stores of a composition: at least two, each with a name of its own."""


Weight = Annotated[float, BeforeValidator(parse_float)]
"""The share of a store in a composition: a finite number."""


class LimitSettings(Settings):
    """The limits of the calls to each store of a composition."""

    timeout_s: PositiveSeconds = 5.0
    """How long a call waits for one store, if it can leave that store's call behind.

    Keep it below the engine's limit: a store that hangs then costs no page of another store.
    """
    lookup_timeout_s: PositiveSeconds = 0.4
    """How long an exists query of up to 256 pages waits for one store. More pages may take longer."""
    breaker_failures: int = Field(default=3, ge=1)
    """How many calls to one store must fail in a row before it is not asked for a while."""
    breaker_cooldown_s: PositiveSeconds = 5.0
    """How long a store that failed is not asked."""

    def allows_longer_calls(self, members: Sequence[MemberSettings]) -> bool:
        """Return True if a member's own `timeout_s` is above that of the composition."""
        own = (member.config.get("timeout_s") for member in members)
        return any(each is not None and parse_seconds(each) > self.timeout_s for each in own)

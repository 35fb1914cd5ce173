"""When a backend must check that the manifest of a key space still exists."""

from __future__ import annotations

import pytest
from pages import space

from hicache_storage.backend_support import registrations
from hicache_storage.backend_support.registrations import Registrations

SPACES = [space(page_tokens=tokens) for tokens in (1, 2, 3)]


def test_a_key_space_is_due_after_its_manifest_was_removed() -> None:
    seen = Registrations()
    seen.note(SPACES[0])
    assert not seen.is_due(SPACES[0])

    seen.forget(SPACES[0].id)
    assert seen.is_due(SPACES[0])


def test_of_more_key_spaces_than_are_remembered_each_is_due_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrations, "_MOST_SPACES", 2)
    seen = Registrations()
    for one in SPACES:
        seen.note(one)

    assert [True, True, False] == [seen.is_due(one) for one in SPACES]

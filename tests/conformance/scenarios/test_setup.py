"""A check that can't apply to a store is `not_declared`. One that lacks a means is `not_verified`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.run.outcomes import NotDeclared, NotVerified
from hicache_conformance.run.subject import Scratch, Subject
from hicache_conformance.scenarios.setup import no_files, no_server
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.subjects import DictSubject, ShelfSubject, WireSubject


@pytest.mark.parametrize(
    ("subject", "kind"),
    [(WireSubject, NotDeclared), (DictSubject, NotDeclared), (ShelfSubject, NotVerified)],
)
def test_a_store_behind_a_server_or_in_memory_has_no_files_to_write(
    subject: type[Subject], kind: type[Exception]
) -> None:
    with Case(subject()) as case:
        assert kind is type(no_files(case))


def test_a_store_in_a_directory_of_its_own_is_asked_to_use_the_tests(tmp_path: Path) -> None:
    class Elsewhere(Subject):
        storage_class = Shelf

        def config(self, scratch: Scratch) -> Mapping[str, Any]:
            return {"path": str(tmp_path)}

    with Case(Elsewhere()) as case:
        assert "use {scratch}" in str(no_files(case))
        assert NotVerified is type(no_server(case))


@pytest.mark.parametrize("subject", [DictSubject, ShelfSubject])
def test_a_store_in_files_or_in_memory_has_no_server(subject: type[Subject]) -> None:
    with Case(subject()) as case:
        assert NotDeclared is type(no_server(case))

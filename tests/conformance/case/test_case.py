"""What a case makes goes when it ends, or when nobody has it any more."""

from __future__ import annotations

import gc
import tempfile
from typing import TYPE_CHECKING

import pytest
from hicache_conformance.case.case import Case
from hicache_conformance.checks import all_checks
from hicache_conformance.run.runner import RunOptions, run_check
from hicache_conformance.selftest.mutants import all_mutants
from hicache_conformance.selftest.references.subjects import DictSubject, subject_of

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty directory the one for temporary files, alone in another."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


def test_the_scratch_is_removed_after_a_case(temporary: Path) -> None:
    with Case(DictSubject()) as case:
        case.new_scratch().path.joinpath("page").touch()

    assert [] == list(temporary.iterdir())


def test_a_case_that_was_not_ended_leaves_nothing(temporary: Path) -> None:
    case = Case(DictSubject())
    assert case.scratch.path.is_relative_to(temporary)

    del case
    gc.collect()
    assert [] == list(temporary.iterdir())


def test_callbacks_at_the_end_of_a_case_run_before_its_scratch_is_removed() -> None:
    seen: list[bool] = []
    with Case(DictSubject()) as case:
        path = case.scratch.path
        case.at_end(lambda: seen.append(path.is_dir()))

    assert [True] == seen


def test_a_store_that_takes_names_for_paths_leaves_nothing(temporary: Path) -> None:
    control = next(one for one in all_mutants() if one.name == "NamesEscape")
    checks = [check for check in all_checks() if check.rule.id == "KV-105"]

    subject = subject_of(control.storage_class)
    said = {check.run.__name__: run_check(subject, check, RunOptions()).message for check in checks}

    assert "outside its directory" in said["a_model_name_leads_to_no_other_directory"]
    assert [temporary] == list(temporary.parent.iterdir())
    assert [] == list(temporary.iterdir())


def test_no_pages_are_missed_without_a_call() -> None:
    with Case(DictSubject()) as case:
        store, space = case.open(), case.space()
        case.must_miss(store, space, [], "was never set")

        assert not [line for line in case.trace.sequence() if "batch_" in line]

"""KV-105: a model may have any name."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared
from hicache_conformance.run.subject import Scratch
from hicache_conformance.scenarios.key_space_neighbours import odd_names
from hicache_conformance.scenarios.setup import another_handle, fitting, note, open_and_set

if TYPE_CHECKING:
    from collections.abc import Collection

    from hicache_conformance.case.case import Case
    from hicache_storage.keys import KeySpace


@check("KV-105", quick=False)
def every_model_name_works(case: Case) -> None:
    """A store keeps the pages of a model, whatever its name is."""
    store = case.open()
    for space in _named_spaces(case):
        with note(f"model {space.model[:40]!r}, {len(space.model)} characters"):
            store.open_space(space)
            case.must_hold(store, space, case.stored(store, space, 1))


@check("KV-105")
def no_model_name_aliases_another(case: Case) -> None:
    """Models with names that a store could easily mix up never see each other's pages."""
    store = case.open()
    spaces = _named_spaces(case)
    (page_hash,) = case.hashes(1)
    for space in spaces:
        store.open_space(space)
        why = f"was set for other models, not for {_name_text(space.model)}"
        case.must_miss(store, space, [page_hash], why)
        open_and_set(case, store, space, page_hash)
    for space in spaces:
        with note(f"model {_name_text(space.model)}, after others were set"):
            case.must_hold(store, space, case.contents(space, [page_hash]))


@check("KV-105", quick=False)
def model_names_survive_reopening(case: Case) -> None:
    """Another handle finds each model's pages, and lists its key space with the same name."""
    store = case.open()
    spaces = _named_spaces(case)
    (page_hash,) = case.hashes(1)
    for space in spaces:
        open_and_set(case, store, space, page_hash)
    again = another_handle(case, store)
    listed = set(again.spaces()) if case.claims.enumerable else set(spaces)
    for space in spaces:
        with note(f"model {_name_text(space.model)}"):
            again.open_space(space)
            there = case.must_hold(again, space, case.contents(space, [page_hash]))
        if there and space not in listed:
            raise again.violation(
                f"spaces() does not list the key space of model {_name_text(space.model)}",
                expected="every key space that holds pages, with the fields that it was opened with",
                got=_nearest(space, listed),
            )


@check("KV-105")
def a_model_name_leads_to_no_other_directory(case: Case) -> None:
    """Whatever the model's name, the store writes only inside its own directory."""
    outer = case.new_scratch()
    inner = Scratch(outer.path / "a" / "b" / "store", outer.prefix)
    inner.path.mkdir(parents=True)
    store = case.open(case.subject.config(inner))
    open_and_set(case, store, case.space(fitting(case, 64)), *case.hashes(1))
    usual = _below(outer.path) - _below(inner.path)
    elsewhere = outer.path / "elsewhere"
    names = odd_names(outer.prefix, str(elsewhere), quick=case.quick)
    for name in (*filter(_is_path, names), "../../.."):
        space = case.space(fitting(case, 64), model=name, tenant=outer.prefix)
        with note(f"model {_name_text(name)}"):
            open_and_set(case, store, space, *case.hashes(1))
        outside = sorted(_below(outer.path) - _below(inner.path) - usual)
        if outside:
            raise store.violation(
                f"model {_name_text(name)} made the store write outside its directory",
                expected=f"no new file outside {inner.path}",
                got=", ".join(outside[:3]),
            )
    if not any(inner.path.iterdir()):
        raise NotDeclared("the store keeps nothing in the test's directory")


def _named_spaces(case: Case) -> list[KeySpace]:
    token = case.scratch.prefix
    nbytes = fitting(case, 64)
    names = odd_names(token, str(case.new_scratch().path), quick=case.quick)
    return [case.space(nbytes, model=name, tenant=token) for name in names]


def _is_path(name: str) -> bool:
    """Return True if a file system could take the name for a path that leads to another directory."""
    return ".." in name or name[0] in "/~."


def _name_text(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:40]!r}... ({len(name)} characters)"


def _nearest(space: KeySpace, listed: Collection[KeySpace]) -> str:
    """Describe the listed key spaces, above all those that differ from `space` only in the model."""
    same = [one.model for one in listed if replace(one, model=space.model) == space]
    return f"{len(listed)} key spaces; models {', '.join(map(_name_text, sorted(same)[:3]))}, ..."


def _below(root: os.PathLike[str]) -> set[str]:
    return {
        f"{directory}/{name}"
        for directory, folders, files in os.walk(root)
        for name in (*folders, *files)
    }

"""Docstrings have a subject and a verb."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest
from servers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PACKAGES = ("hicache_storage", "backends", "conformance", "examples", "benchmarks", "tests")
NOUN_CLAUSES = {"What", "Whether", "How", "Where", "Which", "Those", "That"}
NOT_VERBS = NOUN_CLAUSES | {
    *("A", "An", "The", "None", "True", "False", "It", "They", "This", "These", "One", "Each"),
    *(
        "Every",
        "All",
        "Any",
        "No",
        "Some",
        "So",
        "As",
        "In",
        "On",
        "Of",
        "For",
        "From",
        "If",
        "When",
    ),
    *("Who", "Why", "Many", "Most", "Nothing", "Now", "Not", "Only", "Until", "With", "Without"),
}
FACTS = {"check", "property", "cached_property", "fixture"}
"""Decorators of functions whose docstring names a thing or states a fact."""


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def offenders(source: str) -> Iterator[str]:
    """Yield line, name and docstring of each function or class that breaks the rule."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].strip(",.:;") in _refused(node):
            yield f"{node.lineno}: {node.name}: {' '.join(words[:8])}"


def _refused(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    decorators = {_name(each) for each in node.decorator_list}
    if isinstance(node, ast.ClassDef) or node.name.startswith("test_") or decorators & FACTS:
        return NOUN_CLAUSES
    return NOT_VERBS


def _name(decorator: ast.expr) -> str:
    while isinstance(decorator, ast.Call):
        decorator = decorator.func
    return decorator.attr if isinstance(decorator, ast.Attribute) else getattr(decorator, "id", "")


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert [] == list(offenders(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('def f():\n    """Where it lies."""\n', ["1: f: Where it lies."]),
        ('def f():\n    """The place."""\n', ["1: f: The place."]),
        ('def f():\n    """Return the place."""\n', []),
        ('class C:\n    """The place."""\n', []),
        ('class C:\n    """What it holds."""\n', ["1: C: What it holds."]),
        ('@property\ndef f():\n    """The place."""\n', []),
        ('@check("KV-001")\ndef f():\n    """A page is there."""\n', []),
    ],
)
def test_an_offender_is_named(source: str, expected: list[str]) -> None:
    assert expected == list(offenders(source))

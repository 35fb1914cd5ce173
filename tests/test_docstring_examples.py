"""The examples in docstrings run, and every name that users import has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from typing import Any

import pytest

import hicache_storage
from hicache_storage.controller import CacheController
from hicache_storage.page_store import PageStore

MODULES = [
    "hicache_storage",
    *(
        f"hicache_storage.{name}"
        for name in ("errors", "keys", "page", "registry", "settings", "storage")
    ),
    *(
        module.name
        for package in ("backend_support", "page_store", "controller")
        for module in pkgutil.iter_modules(
            importlib.import_module(f"hicache_storage.{package}").__path__,
            f"hicache_storage.{package}.",
        )
    ),
]
PUBLIC = [
    *(getattr(hicache_storage, name) for name in hicache_storage.__all__),
    PageStore,
    CacheController,
]


def found_examples(module: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(importlib.import_module(module)) if test.examples]


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_of_a_module_run(module: str) -> None:
    for test in found_examples(module):
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        report: list[str] = []

        runner.run(test, out=report.append)

        assert not runner.failures, "".join(report)


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__name__)
def test_a_public_name_has_a_short_example(public: Any) -> None:
    text = inspect.getdoc(public) or ""
    examples = doctest.DocTestParser().get_examples(text)
    imports = sum(example.source.startswith(("import ", "from ")) for example in examples)
    lines = sum(example.source.count("\n") for example in examples)

    assert "\nExamples:\n" in text
    assert 1 <= lines - imports <= 9

"""docs/contract.md uses the same names as the code."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
from servers import ROOT

from hicache_storage import errors, storage
from hicache_storage.keys import KeySpace, Shard
from hicache_storage.storage import HiCacheStorage

PAGE = (ROOT / "docs/contract.md").read_text(encoding="utf-8")
RESULTS = [
    storage.PageInfo,
    storage.PageTimes,
    storage.PageFault,
    storage.UnreadableSpace,
    storage.Diagnosis,
    storage.StorageStats,
]


def names_of(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def listing(head: str) -> str:
    """Return the code block that has the line `head`."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (found,) = (block for block in blocks if head in block)
    return found


def test_every_method_of_a_storage_is_there_once() -> None:
    code = listing("class HiCacheStorage(abc.ABC):").split("@dataclass")[0]
    methods = re.findall(r"^    def (\w+)\(", code, re.MULTILINE)
    attributes = re.findall(r"^    (\w+): ClassVar", code, re.MULTILINE)

    assert sorted(names_of(HiCacheStorage)) == sorted(methods + attributes)


def test_the_listed_abstract_methods_are_abstract() -> None:
    found = re.findall(r"@abstractmethod\n    def (\w+)", listing("class HiCacheStorage(abc.ABC):"))

    assert set(found) == HiCacheStorage.__abstractmethods__


@pytest.mark.parametrize(
    "cls", [storage.Capabilities, KeySpace, Shard], ids=lambda cls: cls.__name__
)
def test_the_fields_of_a_class_are_those_of_the_code(cls: type[Any]) -> None:
    code = (
        listing(f"class {cls.__name__}:")
        .split(f"class {cls.__name__}:")[1]
        .split("\n@dataclass")[0]
    )
    shown = re.findall(r"^    (\w+): [^=#\n]*", code, re.MULTILINE)

    assert [field.name for field in fields(cls)] == shown


@pytest.mark.parametrize("cls", RESULTS, ids=lambda cls: cls.__name__)
def test_the_fields_of_a_result_are_those_of_the_code(cls: type[Any]) -> None:
    (row,) = re.findall(rf"^\| `{cls.__name__}` \| (.*) \|$", PAGE, re.MULTILINE)

    assert {field.name for field in fields(cls)} == set(re.findall(r"`(\w+)`", row))


def test_every_error_has_a_row() -> None:
    of_code = {
        name
        for name, found in inspect.getmembers(errors, inspect.isclass)
        if issubclass(found, errors.HiCacheError) and found is not errors.HiCacheError
    }

    assert of_code == set(
        re.findall(r"^\| `(\w+)` \| (?:`\w+`)? ?\|", PAGE.split("**Errors**")[1], re.MULTILINE)
    )

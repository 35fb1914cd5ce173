from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from servers import ROOT

import hicache_storage

HEAVY = "numpy, torch, pydantic, rich, yaml, xxhash, redis, boto3, hicache_backends"


def test_public_names_are_sorted_and_complete() -> None:
    assert sorted(set(hicache_storage.__all__)) == hicache_storage.__all__


@pytest.mark.parametrize("name", hicache_storage.__all__)
def test_a_public_name_is_there_and_is_its_modules(name: str) -> None:
    value = getattr(hicache_storage, name)

    assert name == value.__name__
    assert value.__module__ in {f"hicache_storage.{module}" for module in hicache_storage._MODULES}
    assert value is getattr(hicache_storage, name)
    assert name in dir(hicache_storage)


def test_a_star_import_brings_all_of_them() -> None:
    namespace: dict[str, object] = {}
    exec("from hicache_storage import *", namespace)  # noqa: S102 - the test is of a star import

    assert set(hicache_storage.__all__) <= set(namespace)


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert project["version"] == hicache_storage.__version__


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pgae'"):
        _ = hicache_storage.Pgae


@pytest.mark.parametrize(
    "statement",
    [
        "import hicache_storage",
        "from hicache_storage import KeySpace, Page, page_hashes",
        "from hicache_storage import HiCacheStorage, ConfigError",
        "from hicache_storage import open_storage",
    ],
)
def test_an_import_of_the_contract_loads_nothing_heavy(statement: str) -> None:
    program = (
        f"{statement}\nimport sys\n"
        f"loaded = set({HEAVY!r}.split(', ')) & set(sys.modules)\n"
        "sys.exit(f'{sorted(loaded)} loaded' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)

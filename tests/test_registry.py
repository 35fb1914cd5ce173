from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hicache_backends.memory import MemoryStorage

from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    StorageUnavailable,
    UnknownBackend,
)
from hicache_storage.registry import backends, open_storage

Install = Callable[..., None]

STORAGE = """
from hicache_backends.memory import MemoryStorage

class Acme(MemoryStorage):
    @classmethod
    def from_config(cls, config):
        storage = cls()
        storage.config = config
        return storage

class NoStorage:
    pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a distribution on `sys.path`: a module, and the backends that it declares."""

    def installed(distribution: str, module: str, source: str, **entry_points: str) -> None:
        root = tmp_path / distribution
        info = root / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (root / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        lines = [f"{name} = {target}" for name, target in entry_points.items()]
        (info / "entry_points.txt").write_text(
            "\n".join(["[hicache_storage.backends]", *lines, ""])
        )
        monkeypatch.setattr(sys, "path", [str(root), *sys.path])
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, module, raising=False)

    return installed


def config_of(storage: object) -> dict[str, Any]:
    """Return the config of an `Acme`, which is defined above."""
    config: dict[str, Any] = vars(storage)["config"]
    return config


# --- names ---------------------------------------------------------------------------------------


def test_a_built_in_is_opened_by_name() -> None:
    with open_storage("memory", {"capacity_nbytes": "1MiB"}) as storage:
        assert isinstance(storage, MemoryStorage)
        assert 1 << 20 == storage.stats().capacity_nbytes


def test_a_config_may_be_left_out() -> None:
    with open_storage("memory") as storage:
        assert isinstance(storage, MemoryStorage)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownBackend, match="'memroy'; did you mean 'memory'"):
        open_storage("memroy")


def test_an_unknown_name_like_no_other_lists_all() -> None:
    with pytest.raises(UnknownBackend, match=r"choose one of dynamic, .*file, .*memory"):
        open_storage("zzz")


def test_a_wrong_config_names_backend_and_field() -> None:
    with pytest.raises(ConfigError, match="memory: unknown field 'capacity'"):
        open_storage("memory", {"capacity": 1})


# --- installed distributions ---------------------------------------------------------------------


def test_an_installed_backend_is_found_and_opened(install: Install) -> None:
    install("acme-cache", "acme_cache", STORAGE, acme="acme_cache:Acme")
    found = backends()["acme"]

    assert ("acme_cache:Acme", "acme-cache", None) == (
        found.target,
        found.distribution,
        found.extra,
    )
    with open_storage("acme", {"url": "x"}) as storage:
        assert {"url": "x"} == config_of(storage)


def test_listing_imports_nothing(install: Install) -> None:
    install("acme-cache", "acme_broken", "raise RuntimeError", acme="acme_broken:Acme")

    assert "acme" in backends()
    assert "acme_broken" not in sys.modules


def test_a_list_of_packages_that_cannot_be_read_is_a_store_that_is_not_there(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_descriptor(**_: str) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(metadata, "entry_points", no_descriptor)
    install("acme-cache", "acme_cache", STORAGE, acme="acme_cache:Acme")
    with pytest.raises(StorageUnavailable, match="Too many open files"):
        open_storage("memory")


def test_the_installed_packages_are_listed_once(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme-cache", "acme_cache", STORAGE, acme="acme_cache:Acme")
    backends()
    monkeypatch.delattr(metadata, "entry_points")
    assert "acme" in backends()


def test_a_package_that_is_installed_later_in_the_same_folder_is_found(
    install: Install, tmp_path: Path
) -> None:
    install("acme-cache", "acme_cache", STORAGE, acme="acme_cache:Acme")
    backends()
    info = tmp_path / "acme-cache" / "later-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hicache_storage.backends]\nlater = acme_cache:Acme\n")
    assert "later" in backends()


def test_two_distributions_with_one_name_are_refused_by_both_names(install: Install) -> None:
    install("acme-cache", "acme_one", STORAGE, acme="acme_one:Acme")
    install("other-cache", "acme_two", STORAGE, acme="acme_two:Acme")

    with pytest.raises(ConfigError, match=r"'acme' is claimed by both .*: uninstall one") as caught:
        open_storage("acme")
    assert "acme-cache" in str(caught.value)
    assert "other-cache" in str(caught.value)


def test_a_built_in_cannot_be_replaced(install: Install) -> None:
    install("acme-cache", "acme_memory", STORAGE, memory="acme_memory:Acme")

    with pytest.raises(ConfigError, match="'memory' is claimed by both hicache-storage and acme-c"):
        open_storage("memory")


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("acme_needy:Acme", "acme-cache"), ("acme_needy:Acme [rdma]", r"acme-cache\[rdma\]")],
)
def test_a_missing_library_is_named_with_what_to_install(
    install: Install, target: str, wanted: str
) -> None:
    install("acme-cache", "acme_needy", "import no_such_client_library", acme=target)

    with pytest.raises(BackendNotInstalled) as caught:
        open_storage("acme")
    assert caught.match("backend 'acme' needs no_such_client_library, which is not installed")
    assert caught.match(f'pip install "{wanted}"$')
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_mistake_of_ours_is_not_taken_for_a_missing_library(install: Install) -> None:
    """No installation would help, so the message does not advise one."""
    source = "from hicache_storage.storage import NoSuchName"
    install("acme-cache", "acme_broken", source, acme="acme_broken:Acme")

    with pytest.raises(ImportError, match="NoSuchName") as caught:
        open_storage("acme")

    assert not isinstance(caught.value, BackendNotInstalled)


def test_one_distribution_may_declare_a_backend_that_needs_an_extra(install: Install) -> None:
    install("acme-cache", "acme_extra", STORAGE, acme="acme_extra:Acme [rdma]")

    assert ("acme_extra:Acme", "rdma") == (backends()["acme"].target, backends()["acme"].extra)
    open_storage("acme").close()


@pytest.mark.parametrize("target", ["acme_other:NoStorage", "acme_other:Missing", "acme_other"])
def test_an_entry_point_to_no_storage_is_refused(install: Install, target: str) -> None:
    install("acme-cache", "acme_other", STORAGE, acme=target)

    with pytest.raises(ConfigError, match=r"acme_other:.* is not a storage"):
        open_storage("acme")


# --- dynamic -------------------------------------------------------------------------------------

DYNAMIC = {"backend_name": "acme", "module_path": "acme_dynamic", "class_name": "Acme"}


@pytest.fixture
def dynamic(install: Install) -> Callable[..., dict[str, Any]]:
    """Return a function that opens a dynamic backend and returns the config of its class."""
    install("unnamed", "acme_dynamic", STORAGE)

    def opened(**changes: Any) -> dict[str, Any]:
        with open_storage("dynamic", DYNAMIC | changes) as storage:
            return config_of(storage)

    return opened


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({}, {}),
        ({"config": {"url": "x"}}, {"url": "x"}),
        ({"url": "x"}, {"url": "x"}),
        ({"url": "x", "config": {"tries": 2}}, {"url": "x", "tries": 2}),
        ({"url": "x", "config": {"url": "y"}}, {"url": "y"}),
    ],
    ids=str,
)
def test_a_dynamic_backends_fields_stand_below_config_or_beside_it(
    dynamic: Callable[..., dict[str, Any]], changes: dict[str, Any], seen: dict[str, Any]
) -> None:
    assert seen == dynamic(**changes)


@pytest.mark.parametrize("field", DYNAMIC)
def test_a_dynamic_backend_without_a_field_is_refused(field: str) -> None:
    config = {name: value for name, value in DYNAMIC.items() if name != field}
    for wrong in (config, config | {field: 5}):
        with pytest.raises(ConfigError, match=f"dynamic: {field}: .*required"):
            open_storage("dynamic", wrong)


@pytest.mark.usefixtures("dynamic")
def test_a_dynamic_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ConfigError, match="dynamic: config: must be an object, not list"):
        open_storage("dynamic", DYNAMIC | {"config": []})


def test_a_dynamic_module_that_is_not_there_is_named() -> None:
    with pytest.raises(BackendNotInstalled, match="'no_such_module' of backend 'acme'"):
        open_storage("dynamic", DYNAMIC | {"module_path": "no_such_module"})


@pytest.mark.parametrize("module_path", ["", ".", ".relative", "a..b", "acme/dynamic.py", "a b"])
def test_a_dynamic_module_path_that_is_no_dotted_name_is_refused(module_path: str) -> None:
    with pytest.raises(ConfigError, match="module_path: must be a dotted name"):
        open_storage("dynamic", DYNAMIC | {"module_path": module_path})


@pytest.mark.parametrize("class_name", ["NoStorage", "Missing", ""])
@pytest.mark.usefixtures("dynamic")
def test_a_dynamic_class_that_is_no_storage_is_refused(class_name: str) -> None:
    with pytest.raises(ConfigError, match=f"acme_dynamic:{class_name} is not a storage"):
        open_storage("dynamic", DYNAMIC | {"class_name": class_name})


def test_a_class_with_methods_missing_is_refused() -> None:
    config = {"module_path": "hicache_storage.storage", "class_name": "HiCacheStorage"}
    with pytest.raises(ConfigError, match="does not implement all of"):
        open_storage("dynamic", DYNAMIC | config)


def test_a_configs_owner_finds_it_unchanged(dynamic: Callable[..., dict[str, Any]]) -> None:
    below = {"url": "x"}
    dynamic(config=below)["more"] = 1

    assert {"url": "x"} == below


# --- laziness ------------------------------------------------------------------------------------


def test_opening_one_backend_imports_no_other() -> None:
    program = (
        "import json, sys\n"
        "from hicache_storage import open_storage\n"
        "open_storage('memory').close()\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('hicache_backends.')]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    opened = {name.split(".")[1] for name in json.loads(told.stdout)}
    assert {"memory"} == opened

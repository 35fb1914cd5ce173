"""Find a backend by its name (built-in, installed, or `dynamic`), and open its storage."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.backend_support.read_only import ReadOnlyStorage
from hicache_storage.errors import (
    BackendNotInstalled,
    ConfigError,
    NoSuchStore,
    StorageUnavailable,
    UnknownBackend,
    install_command,
    shown,
)
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ENTRY_POINT_GROUP = "hicache_storage.backends"
DYNAMIC = "dynamic"
_OUR_PACKAGES = ("hicache_storage", "hicache_backends")
_DYNAMIC_FIELDS = ("backend_name", "module_path", "class_name")


@dataclass(frozen=True, slots=True)
class Backend:
    """The name of a backend, and where its class is."""

    name: str
    target: str
    """`module:Class`. The module is imported when you open the backend."""
    distribution: str
    extra: str | None = None
    """The extra of `distribution` that installs the libraries that the backend needs."""
    instead: str = ""
    """The end of the installation advice: another extra, and when to install that extra instead."""

    def load(self) -> type[HiCacheStorage]:
        """Import the class.

        Raises:
            BackendNotInstalled: A library is missing. The message names the package to install.
            ConfigError: The target is not a storage class.
        """
        module, _, name = self.target.partition(":")
        try:
            return _storage_class(importlib.import_module(module), name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] in _OUR_PACKAGES:
                raise  # our own package is broken, and installing another would not help
            package = f"{self.distribution}[{self.extra}]" if self.extra else self.distribution
            ours = self.distribution == "hicache-storage"
            command = install_command(self.extra) if ours else f'pip install "{package}"'
            raise BackendNotInstalled(
                f"backend {self.name!r} needs {error.name or error}, which is not installed:"
                f" {command}{self.instead}"
            ) from error


_BUILT_INS = {
    backend.name: backend
    for backend in (
        Backend("memory", "hicache_backends.memory:MemoryStorage", "hicache-storage"),
        Backend("file", "hicache_backends.file:FileStorage", "hicache-storage"),
        Backend("redis", "hicache_backends.redis:RedisStorage", "hicache-storage", "redis"),
        Backend("s3", "hicache_backends.s3:S3Storage", "hicache-storage", "s3"),
        Backend("fsspec", "hicache_backends.fsspec:FsspecStorage", "hicache-storage", "fsspec"),
        Backend("hf3fs", "hicache_backends.hf3fs:Hf3fsStorage", "hicache-storage"),
        Backend(
            "mooncake",
            "hicache_backends.mooncake:MooncakeStorage",
            "hicache-storage",
            "mooncake",
            f", or if there is no CUDA: {install_command('mooncake-non-cuda')}",
        ),
        Backend("tiered", "hicache_backends.tiered:TieredStorage", "hicache-storage"),
        Backend("striped", "hicache_backends.striped:StripedStorage", "hicache-storage"),
        Backend(
            "encrypted",
            "hicache_backends.encrypted:EncryptedStorage",
            "hicache-storage",
            "encrypted",
        ),
    )
}


def backends() -> dict[str, Backend]:
    """Return every known backend by name, built-ins first. Import none of them.

    Raises:
        ConfigError: Two distributions use the same name, or one uses the name of a built-in.
        StorageUnavailable: The system cannot list the installed packages.
    """
    found = dict(_BUILT_INS)
    try:
        entries = _entry_points(*[(path, _modified_ns(path)) for path in sys.path])
    except OSError as error:
        raise StorageUnavailable(f"the installed packages cannot be listed: {error}") from error
    for entry in entries:
        owner = entry.dist.name if entry.dist else "an unknown distribution"
        target = entry.value.partition("[")[0].strip()
        taken = found.get(entry.name)
        if taken is not None and (taken.target, taken.distribution) != (target, owner):
            raise ConfigError(
                f"backend {entry.name!r} is claimed by both {taken.distribution} and {owner}:"
                " uninstall one of them"
            )
        extra = entry.extras[0] if entry.extras else None
        found[entry.name] = Backend(entry.name, target, owner, extra)
    return found


@functools.lru_cache(maxsize=1)  # a listing reads a file of every installed package
def _entry_points(*_paths: tuple[str, int | None]) -> EntryPoints:
    from importlib import metadata  # noqa: PLC0415 - `hicache --help` stays fast

    return metadata.entry_points(group=ENTRY_POINT_GROUP)


def _modified_ns(path: str) -> int | None:
    """Return a time that changes if a package is installed in `path` or removed."""
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return None


def open_storage(
    name: str, config: Mapping[str, Any] | None = None, *, read_only: bool = False
) -> HiCacheStorage:
    """Open the storage of backend `name` with the fields of `config`. The caller closes it.

    The backend `dynamic` takes `backend_name`, `module_path` and `class_name`, as in SGLang. Put the
    backend's own fields next to them or under `config`.

    With `read_only` nothing that you call changes the store, even if it is over its limits: no page is
    evicted, collected, healed or counted as used, and a call that would change something raises
    UnsupportedOperation.

    Raises:
        UnknownBackend: No backend has this name. The message suggests the closest one.
        BackendNotInstalled: A library is missing. The message names the package to install.
        ConfigError: A field is wrong, missing or unknown.
        NoSuchStore: With `read_only`, there is no store, and none is created.
        StorageUnavailable: The store cannot be reached.

    Examples:
        >>> with open_storage("memory", {"capacity_nbytes": "1GiB"}) as storage:
        ...     storage.capabilities.enumerable
        True
    """
    storage_class, fields = resolve(name, config)
    if not read_only:
        return storage_class.from_config(fields)
    place = storage_class.would_create(fields)
    if place is not None:
        raise NoSuchStore(
            f"{name}: there is no store at {shown(place)}: correct the path (an engine"
            " creates a store when it opens one)"
        )
    return ReadOnlyStorage(storage_class.open_read_only(fields))


def resolve(
    name: str, config: Mapping[str, Any] | None = None
) -> tuple[type[HiCacheStorage], dict[str, Any]]:
    """Return the class of backend `name`, and the fields of `config` that belong to the backend.

    Raises:
        UnknownBackend, BackendNotInstalled, ConfigError: As in `open_storage`.
    """
    fields = dict(config or {})
    if name == DYNAMIC:
        return _dynamic_class(fields), _dynamic_config(fields)
    known = backends()
    if name not in known:
        raise UnknownBackend(name, [*known, DYNAMIC])
    return known[name].load(), fields


def _dynamic_class(fields: Mapping[str, Any]) -> type[HiCacheStorage]:
    missing = [name for name in _DYNAMIC_FIELDS if not isinstance(fields.get(name), str)]
    if missing:
        raise ConfigError(f"{DYNAMIC}: {missing[0]}: this field is required, as a string")
    name, module_path, class_name = (fields[name] for name in _DYNAMIC_FIELDS)
    if not all(part.isidentifier() for part in module_path.split(".")):
        raise ConfigError(
            f"{DYNAMIC}: module_path: must be a dotted name, not {shown(module_path)!r}"
        )
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise BackendNotInstalled(
            f"{DYNAMIC}: module_path {module_path!r} of backend {name!r} cannot be imported: {error}"
        ) from error
    return _storage_class(module, class_name)


def _dynamic_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    beside = {
        key: value for key, value in fields.items() if key not in (*_DYNAMIC_FIELDS, "config")
    }
    below = fields.get("config", {})
    if not isinstance(below, Mapping):
        raise ConfigError(f"{DYNAMIC}: config: must be an object, not {type(below).__name__}")
    return {**beside, **cast("Mapping[str, Any]", below)}


def _storage_class(module: Any, name: str) -> type[HiCacheStorage]:
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, HiCacheStorage):
        if not inspect.isabstract(found):
            return found
        raise ConfigError(f"{module.__name__}:{name} does not implement all of HiCacheStorage")
    raise ConfigError(
        f"{module.__name__}:{name} is not a storage: name a subclass of HiCacheStorage"
    )

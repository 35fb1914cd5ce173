"""Flags that choose a store for a verb, and functions that open the store.

    hicache ls --hicache-storage-backend file --hicache-storage-backend-extra-config @kv.toml
    hicache ls --config sglang.yaml

The file given with `--config` uses the names of SGLang's flags, with or without hyphens. It may also
hold other settings of an engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from hicache_storage import config
from hicache_storage.cli.program import Parser, add_cwd_to_path
from hicache_storage.cli.sizes import format_nbytes
from hicache_storage.errors import (
    ConfigError,
    NoSuchStore,
    UnsupportedOperation,
    did_you_mean,
    shown,
)

if TYPE_CHECKING:
    import argparse

    from hicache_storage.storage import HiCacheStorage

_BACKEND = "hicache-storage-backend"
_EXTRA_CONFIG = "hicache-storage-backend-extra-config"
_FLAGS = (
    _BACKEND,
    _EXTRA_CONFIG,
    "hicache-storage-prefetch-policy",
    "hicache-write-policy",
    "hicache-mem-layout",
    "page-size",
    "served-model-name",
)


def add_store_arguments(
    parser: argparse.ArgumentParser, *, engine_flags_in_help: bool = False
) -> None:
    """Add SGLang's storage flags, and `--config`."""
    config.add_arguments(parser, engine_flags_in_help=engine_flags_in_help)
    parser.add_argument(
        "--config", metavar="FILE", help="a .json, .toml or .yaml file that holds these flags"
    )


def store_choice(arguments: argparse.Namespace) -> config.StorageChoice:
    """Return the choice made by the flags of `add_store_arguments`.

    Raises:
        ConfigError: No backend is named, or two are named, or a config is wrong.
    """
    if arguments.config is None:
        return config.StorageChoice.from_arguments(arguments)
    if arguments.hicache_storage_backend or arguments.hicache_storage_backend_extra_config:
        raise ConfigError(
            f"--config names the backend already: leave out --{_BACKEND} and --{_EXTRA_CONFIG}"
        )
    for flag in _FLAGS:
        name = flag.replace("-", "_")
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ConfigError(
                f"--config holds the engine's flags: leave out --{flag}, or add it to that file"
            )
    return config_file_choice(arguments.config, "--config")


def config_file_choice(name: str, flag: str) -> config.StorageChoice:
    """Return the choice made by a file with SGLang's flags.

    Raises:
        ConfigError: The file cannot be read, or names no backend, or one of its values is wrong.
    """
    parser = Parser(prog=f"{flag} {shown(name)}", add_help=False, allow_abbrev=False)
    config.add_arguments(parser)
    where = f"{flag}: {shown(name)}"
    fields = _storage_fields(config.read_config_file(name, flag), where)
    if not fields.get(_BACKEND):
        raise ConfigError(f"{where}: {_BACKEND} is required; `hicache backends` lists the names")
    argv = [
        f"--{key}={_flag_text(key, value, where)}"
        for key, value in fields.items()
        if value is not None
    ]
    return config.StorageChoice.from_arguments(parser.parse(argv)[0])


def open_store(choice: config.StorageChoice) -> HiCacheStorage:
    """Open the chosen store. The caller closes it. Raises what `registry.open_storage` raises."""
    add_cwd_to_path(choice.backend, choice.config)
    return choice.open()


def open_existing_store(choice: config.StorageChoice) -> HiCacheStorage:
    """Open the chosen store read-only, for a verb that only looks (`registry.open_storage`)."""
    add_cwd_to_path(choice.backend, choice.config)
    return choice.open(read_only=True)


def open_listed_store(choice: config.StorageChoice, verb: str) -> HiCacheStorage:
    """Open the chosen store for a verb that reads its list of pages.

    Raises:
        UnsupportedOperation: The store cannot list its pages. The message says why the verb cannot work.
    """
    storage = open_existing_store(choice)
    if not storage.capabilities.enumerable:
        storage.close()
        raise UnsupportedOperation(
            f"{verb}: the backend {choice.backend!r} cannot list its pages with this config"
            " (enumerable: no)"
        )
    return storage


def open_to_change(choice: config.StorageChoice) -> HiCacheStorage:
    """Open the chosen store for writing, after checking that this would not evict anything.

    Raises:
        ConfigError: The store holds more than the capacity in the choice.
    """
    with suppress(NoSuchStore), open_existing_store(choice) as storage:
        if (excess := excess_of(storage)) is not None:
            raise ConfigError(
                f"{choice.backend}: {excess}. Opening the store for writing with this config"
                " would evict pages: use the capacity_nbytes of the engines"
            )
    return open_store(choice)


def excess_of(storage: HiCacheStorage) -> str | None:
    """Return a text about how far a store's pages exceed its capacity. None if they fit."""
    stats = storage.stats()
    if (
        stats.nbytes is None
        or stats.capacity_nbytes is None
        or stats.nbytes <= stats.capacity_nbytes
    ):
        return None
    return (
        f"the store holds {format_nbytes(stats.nbytes)}, but capacity_nbytes"
        f" is {format_nbytes(stats.capacity_nbytes)}"
    )


def is_same_store(one: config.StorageChoice, other: config.StorageChoice) -> bool:
    """Return True if two choices certainly name the same store, by the same place or the same config."""
    return one.backend == other.backend and _place(one.config) == _place(other.config)


def _place(config: Mapping[str, Any]) -> object:
    """Return the part of a config that names the place of the store: the path, or the whole config."""
    path = config.get("path")
    if isinstance(path, str):
        return os.path.realpath(os.path.expanduser(path))  # noqa: PTH111 - as the backends do
    return {
        name: _place(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping)
        else (value.rstrip("/") if isinstance(value, str) else value)
        for name, value in config.items()
    }


def _storage_fields(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields about storage, by the names of flags. Refuse misspelled names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if flag in _FLAGS:
            if flag in found:
                raise ConfigError(f"{where}: {name}: this field is given twice")
            found[flag] = value
        elif flag.startswith("hicache-storage"):
            raise ConfigError(
                f"{where}: unknown field {shown(name)!r}{did_you_mean(flag, [*_FLAGS])}"
            )
    return found


def _flag_text(flag: str, value: Any, where: str) -> str:
    """Return a value from a config file as you would write it after a flag."""
    if flag == _EXTRA_CONFIG and isinstance(value, dict):
        try:
            return json.dumps(cast("dict[str, Any]", value))
        except (TypeError, ValueError):
            raise ConfigError(f"{where}: {flag}: holds a value that JSON cannot hold") from None
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{where}: {flag}: must be text, not {type(value).__name__}")
    return str(value)

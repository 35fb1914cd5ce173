"""Flags that choose a store for a verb, and functions that open the store.

    hicache ls --hicache-storage-backend file --hicache-storage-backend-extra-config @kv.toml
    hicache ls --config sglang.yaml
    hicache ls --store prod

The file given with `--config` uses the names of SGLang's flags, with or without hyphens. It may also
hold other settings of an engine. `--store` finds the same fields under a name in one file of stores.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hicache_storage import config
from hicache_storage.backend_support.wrapper import WrapperStorage
from hicache_storage.cli.program import Parser, add_cwd_to_path
from hicache_storage.cli.sizes import format_nbytes
from hicache_storage.composition.labels import LABEL
from hicache_storage.composition.parts import find_part, place_of, undivided
from hicache_storage.errors import (
    ConfigError,
    NoSuchStore,
    StorageTimeout,
    StorageUnavailable,
    UnsupportedOperation,
    did_you_mean,
    shown,
)
from hicache_storage.scalars import expand_home

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from hicache_storage.storage import HiCacheStorage

_BACKEND = "hicache-storage-backend"
_EXTRA_CONFIG = "hicache-storage-backend-extra-config"
_STORES = "HICACHE_STORES"
_STORES_FILE = "~/.config/hicache/stores.toml"
_FLAGS = (
    _BACKEND,
    _EXTRA_CONFIG,
    "hicache-storage-prefetch-policy",
    "hicache-write-policy",
    "hicache-mem-layout",
    "page-size",
    "served-model-name",
)
TO_TIER = "--to-tier"
EVICT = "--evict"
_HICACHE_FLAGS = ("--model-path", "--hicache-io-backend", "--hicache-size", "--hicache-ratio")


def add_store_arguments(
    parser: argparse.ArgumentParser, *, engine_flags_in_help: bool = False
) -> None:
    """Add SGLang's storage flags, and `--config` and `--store`.

    The parser also accepts HiCache's other flags, which decide nothing about a store.
    """
    import argparse  # noqa: PLC0415 - only programs that parse flags need it

    config.add_arguments(parser, engine_flags_in_help=engine_flags_in_help)
    for flag in _HICACHE_FLAGS:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--enable-hierarchical-cache", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--config", metavar="FILE", help="a .json, .toml or .yaml file that holds these flags"
    )
    parser.add_argument(
        "--store",
        nargs="?",
        const="",
        metavar="NAME",
        help=f"the store of this name in the file that {_STORES} names (default: {_STORES_FILE});"
        " without a NAME, list the names",
    )


def add_tier_argument(group: Any, *, flag: str = "--tier") -> None:
    """Add the flag that chooses one part of a composed store to a parser or a group."""
    group.add_argument(
        flag,
        metavar="NAME",
        help="only this tier or stripe of the store, such as nvme, or nvme/a for a stripe in a tier",
    )


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose a second store."""
    group = parser.add_argument_group("target")
    add = group.add_argument
    add("--to-backend", metavar="NAME", help="the backend of the target")
    add("--to-extra-config", metavar="JSON|@FILE", help="its config, in the form of the source's")
    add("--to-config", metavar="FILE", help="a file that holds both, instead of these flags")
    add("--to-store", metavar="NAME", help="a store of the file that --store reads, instead")
    add_tier_argument(group, flag=TO_TIER)


def add_evict_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag that lets a verb write more than the store has free space for."""
    parser.add_argument(
        EVICT,
        action="store_true",
        help="write even if the store has too little free space: it may throw out as many bytes of its"
        " pages as the verb writes",
    )


def source_and_target(
    arguments: argparse.Namespace, verb: str
) -> tuple[config.StorageChoice, config.StorageChoice, bool]:
    """Return the choices made by the flags of `add_store_arguments` and `add_target_arguments`.

    The last value is True if both are the same store, which most verbs refuse with `same_store`.

    Raises:
        ConfigError: One of them is missing or wrong.
    """
    source, target = store_choice(arguments), _target_choice(arguments, verb)
    is_same = is_same_store(source, target) and arguments.tier == arguments.to_tier
    return source, target, is_same


def same_store(verb: str) -> ConfigError:
    """Return the error about a source and a target that are the same store."""
    return ConfigError(f"{verb}: source and target are the same store: name another target")


def _target_choice(arguments: argparse.Namespace, verb: str) -> config.StorageChoice:
    backend, extra_config = arguments.to_backend, arguments.to_extra_config
    flag = _naming_flag({"--to-config": arguments.to_config, "--to-store": arguments.to_store})
    if flag is None:
        if backend is None:
            raise ConfigError(f"{verb}: --to-backend, --to-config or --to-store is required")
        return config.StorageChoice(backend=backend, config=config.load_extra_config(extra_config))
    if backend is not None or extra_config is not None:
        raise ConfigError(
            f"{flag} names the target already: leave out --to-backend and --to-extra-config"
        )
    if arguments.to_store is not None:
        return _named_choice(arguments.to_store, flag)
    return config_file_choice(arguments.to_config, flag)


def store_choice(arguments: argparse.Namespace) -> config.StorageChoice:
    """Return the choice made by the flags of `add_store_arguments`.

    Raises:
        ConfigError: No backend is named, or two are named, or a config is wrong.
    """
    flag = _naming_flag({"--config": arguments.config, "--store": arguments.store})
    if flag is None:
        return config.StorageChoice.from_arguments(arguments)
    if arguments.hicache_storage_backend or arguments.hicache_storage_backend_extra_config:
        raise ConfigError(
            f"{flag} names the backend already: leave out --{_BACKEND} and --{_EXTRA_CONFIG}"
        )
    for engine_flag in _FLAGS:
        name = engine_flag.replace("-", "_")
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ConfigError(
                f"{flag} holds the engine's flags: leave out --{engine_flag}, or add it to that file"
            )
    if arguments.store is not None:
        return _named_choice(arguments.store, flag)
    return config_file_choice(arguments.config, flag)


def _naming_flag(values: Mapping[str, str | None]) -> str | None:
    """Return which of the flags that name a whole store is given. None: neither is."""
    given = [flag for flag, value in values.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each name a store: leave out one of them")
    return given[0] if given else None


def _named_choice(name: str, flag: str) -> config.StorageChoice:
    """Return the choice under a name in the file of stores.

    Raises:
        ConfigError: There is no such file or name, or a value of the store is wrong.
    """
    file = os.environ.get(_STORES) or _STORES_FILE
    where = f"{flag} {shown(name)!r}"
    try:
        file = expand_home(file)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {shown(file)}: {error}; name another one in {_STORES}"
        ) from None
    with suppress(OSError):  # reading the file says so
        if not Path(file).exists():
            raise ConfigError(
                f"{where}: there is no file {shown(file)}: write it, or name another one in {_STORES}"
            )
    stores = config.read_config_file(file, where)
    if not name:
        raise ConfigError(f"{flag} needs a name: {shown(file)} has {', '.join(map(shown, stores))}")
    if name not in stores:
        raise ConfigError(
            f"{where}: {shown(file)} has no store of this name{did_you_mean(name, [*stores])}"
        )
    fields = stores[name]
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: {shown(file)}: must be a table with the fields of a store")
    return _choice_of(cast("dict[str, Any]", fields), f"{where}: {shown(file)}")


def config_file_choice(name: str, flag: str) -> config.StorageChoice:
    """Return the choice made by a file with SGLang's flags.

    Raises:
        ConfigError: The file cannot be read, or names no backend, or one of its values is wrong.
    """
    return _choice_of(config.read_config_file(name, flag), f"{flag}: {shown(name)}")


def _choice_of(found: dict[str, Any], where: str) -> config.StorageChoice:
    parser = Parser(add_help=False, allow_abbrev=False)
    config.add_arguments(parser)
    fields = _storage_fields(found, where)
    if not fields.get(_BACKEND):
        raise ConfigError(f"{where}: {_BACKEND} is required; `hicache backends` lists the names")
    argv = [
        f"--{key}={_flag_text(key, value, where)}"
        for key, value in fields.items()
        if value is not None
    ]
    try:
        arguments, _ = parser.parse(argv)
    except ConfigError as error:  # it speaks of flags, and of their help
        reason = str(error).removeprefix("argument --").partition(" (see ")[0]
        raise ConfigError(f"{where}: {reason}") from None
    return config.StorageChoice.from_arguments(arguments)


def open_store(choice: config.StorageChoice) -> HiCacheStorage:
    """Open the chosen store. The caller closes it. Raises what `registry.open_storage` raises."""
    add_cwd_to_path(choice.backend, choice.config)
    return choice.open()


def open_existing_store(choice: config.StorageChoice) -> HiCacheStorage:
    """Open the chosen store read-only, for a verb that only looks (`registry.open_storage`)."""
    add_cwd_to_path(choice.backend, choice.config)
    return choice.open(read_only=True)


def open_listed_store(
    choice: config.StorageChoice, verb: str, tier: str | None = None, *, flag: str = "--tier"
) -> HiCacheStorage:
    """Open the chosen store, or one tier of it, for a verb that reads its list of pages.

    `flag` is the flag that names the tier.

    Raises:
        ConfigError: The store has no such tier.
        UnsupportedOperation: The store cannot list its pages. The message says why the verb cannot work.
    """
    storage = _tier_of(open_existing_store(choice), tier, flag)
    if not storage.capabilities.enumerable:
        storage.close()
        raise UnsupportedOperation(
            f"{verb}: the backend {choice.backend!r} cannot list its pages with this config"
            " (enumerable: no)"
        )
    return storage


def open_to_change(
    choice: config.StorageChoice, tier: str | None = None, *, flag: str = "--tier"
) -> HiCacheStorage:
    """Open the chosen store for writing, after checking that this would not evict anything.

    With `tier`, which `flag` names, return this part of it. Opening it opens all of them.

    Raises:
        ConfigError: The store, or one of its parts, holds more than its capacity in the choice. Or it
            has no such tier.
        StorageUnavailable, StorageTimeout: A part does not answer, or is missing. Only the target of a
            copy (`TO_TIER`) makes a missing store.
    """
    with suppress(NoSuchStore):
        open_before_change(choice, tier, flag=flag).close()
    from hicache_storage.cli.operations.answering import Answering  # noqa: PLC0415 - `--help` stays fast

    storage = open_store(choice)
    with ExitStack() as stack:
        stack.callback(storage.close)
        for name, error in Answering.of(storage).failed.items():
            raise type(error)(f"{name}: {error}") from error
        stack.pop_all()
    return _tier_of(storage, tier, flag)


def open_before_change(
    choice: config.StorageChoice, tier: str | None = None, *, flag: str = "--tier"
) -> HiCacheStorage:
    """Open the chosen store read-only, and check what `open_to_change` checks.

    Raises:
        ConfigError, StorageUnavailable, StorageTimeout: As in `open_to_change`.
        NoSuchStore: There is no store. `open_to_change` would make one.
    """
    from hicache_storage.cli.operations.answering import Answering  # noqa: PLC0415 - `--help` stays fast

    storage = open_existing_store(choice)
    with ExitStack() as stack:
        stack.callback(storage.close)
        if tier is not None:
            find_part(storage, tier, flag)
        for excess in excesses_of(storage).values():
            raise ConfigError(
                f"{choice.backend}: {excess}. Opening the store for writing with this config"
                " would evict pages: use the capacity_nbytes of the engines"
            )
        for name, error in Answering.of(storage).failed.items():
            is_target = tier is None or f"{name}/".startswith(f"{tier}/")
            if flag != TO_TIER or not is_target:
                raise type(error)(f"{name}: {error}") from error
        stack.pop_all()
    return _tier_of(storage, tier, flag)


def excesses_of(storage: HiCacheStorage) -> dict[str, str]:
    """Return a text about each part whose pages exceed its capacity, by its name, or by "" for all.

    A part that does not answer is left out. It evicts nothing either.
    """
    found: dict[str, str] = {}
    for name, part in undivided(storage).items():
        with suppress(StorageUnavailable, StorageTimeout):
            stats = part.stats()
            held, capacity = stats.nbytes, stats.capacity_nbytes
            if held is not None and capacity is not None and held > capacity:
                found[name] = (
                    f"{shown(name) or 'the store'} holds {format_nbytes(held)}, but"
                    f" capacity_nbytes is {format_nbytes(capacity)}"
                )
    return found


def label_lines(storage: HiCacheStorage) -> list[str]:
    """Return a line about each stripe that has another name in its label than in the config."""
    return [
        f"{one.topic}: {one.fact}: {one.advice}"
        for one in (storage.diagnose() if storage.parts() else ())
        if one.topic.endswith(f": {LABEL}")
    ]


class _Tier(WrapperStorage):
    """A part of a store. It closes the whole, whose alignment decides how pages are framed."""

    def __init__(self, whole: HiCacheStorage, part: HiCacheStorage) -> None:
        super().__init__(part)
        alignment = whole.capabilities.alignment
        vars(self)["capabilities"] = replace(part.capabilities, alignment=alignment)
        self._whole = whole

    def close(self) -> None:
        self._whole.close()
        super().close()


def _tier_of(storage: HiCacheStorage, name: str | None, flag: str) -> HiCacheStorage:
    """Return a part of an open store, or the store without a name. If there is none, close the store."""
    if name is None:
        return storage
    with ExitStack() as stack:
        stack.callback(storage.close)
        part = _Tier(storage, find_part(storage, name, flag))
        stack.pop_all()
    return part


def is_same_store(one: config.StorageChoice, other: config.StorageChoice) -> bool:
    """Return True if two choices certainly name the same store, by the same place or the same config."""
    return one.backend == other.backend and place_of(one.config) == place_of(other.config)


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

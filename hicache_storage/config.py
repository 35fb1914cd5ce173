"""Give your program the flags that choose a storage in SGLang.

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    choice = StorageChoice.from_arguments(parser.parse_args())
    with choice.open() as storage:
        ...

The flags have the names, defaults and meanings of SGLang's (sglang/srt/arg_groups/fields/memory.py).
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from hicache_storage.controller_settings import ControllerSettings, WritePolicy
from hicache_storage.durations import check_seconds
from hicache_storage.errors import ConfigError, shown
from hicache_storage.prefetch_policy import PrefetchPolicy
from hicache_storage.scalars import check_integer, expand_home

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from hicache_storage.storage import HiCacheStorage

PREFETCH_POLICIES = tuple(policy.value for policy in PrefetchPolicy)
WRITE_POLICIES = tuple(policy.value for policy in WritePolicy)
MEM_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

SGLANG_FIELDS: frozenset[str] = frozenset(
    {
        "allocator",
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
"""SGLang's own fields of the extra config. SGLang removes some of them, but not on every path
(disaggregation/decode_kvcache_offload_manager.py passes all fields on)."""

_DEFAULTS = ControllerSettings()
_MAX_FLAG_DIGITS = 18
_MAX_JSON_DIGITS = 100
_MAX_VALUES = 10_000
_MISSING_IN_JSON = {
    "Expecting ',' delimiter": "a comma or a closing bracket is missing",
    "Expecting ':' delimiter": "a colon is missing",
}
_QUOTES = re.compile("""['"`]""")
_PLACE = re.compile(r"at (?:line [0-9]+, column [0-9]+|end of document)(?=\)?$)")
_WRONG_TAG = "a value is not of the type that its tag names"
_BACKEND = "--hicache-storage-backend"
_EXTRA_CONFIG = "--hicache-storage-backend-extra-config"
_SGLANG_ADAPTER = "hicache_storage.integrations.sglang"


def add_arguments(parser: argparse.ArgumentParser, *, engine_flags_in_help: bool = True) -> None:
    """Add the flags to `parser`, in a group of their own.

    With `engine_flags_in_help=False` the help leaves out the flags that only an engine needs (policies,
    layout, page size, model). The parser still accepts them, so users can paste an engine's command
    line.
    """
    import argparse  # noqa: PLC0415 - only programs that parse flags need it

    add = parser.add_argument_group("storage, as in SGLang").add_argument
    add(_BACKEND, metavar="NAME", help="where pages are stored; `hicache backends` lists the names")
    add(
        _EXTRA_CONFIG,
        metavar="JSON|@FILE",
        help="the backend's config: JSON, or @ and a .json, .toml, .yaml or .yml file",
    )

    def add_engines(flag: str, help_text: str, **options: Any) -> None:
        add(flag, help=help_text if engine_flags_in_help else argparse.SUPPRESS, **options)

    add_engines(
        "--hicache-storage-prefetch-policy",
        "how long a request waits for its pages (default: %(default)s)",
        choices=PREFETCH_POLICIES,
        default=_DEFAULTS.prefetch_policy.value,
    )
    add_engines(
        "--hicache-write-policy",
        "when a page is written to the storage (default: %(default)s)",
        choices=WRITE_POLICIES,
        default=_DEFAULTS.write_policy.value,
    )
    add_engines(
        "--hicache-mem-layout",
        "byte order inside a page (default: %(default)s)",
        choices=MEM_LAYOUTS,
        default="page_first",
    )
    add_engines(
        "--page-size",
        "tokens in a page (default: the engine's)",
        type=positive_int,
        metavar="TOKENS",
    )
    add_engines("--served-model-name", "the model's name in keys", metavar="NAME")


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1. Use it as an argparse type."""
    import argparse  # noqa: PLC0415 - only programs that parse flags need it

    if not (
        text.isascii() and text.isdecimal() and len(text) <= _MAX_FLAG_DIGITS and int(text) >= 1
    ):
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, not {shown(text)!r}")
    return int(text)


def int_up_to(most: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers from 1 to `most`."""

    def parse(text: str) -> int:
        import argparse  # noqa: PLC0415 - as above

        number = positive_int(text)
        if number > most:
            raise argparse.ArgumentTypeError(f"must be at most {most:,}, not {shown(text)!r}")
        return number

    return parse


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageChoice:
    """The storage and policies that the flags chose."""

    backend: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    """The extra config without SGLang's own fields. Not in the `repr`: it may contain secrets."""
    controller: ControllerSettings = _DEFAULTS
    """The policies, with SGLang's own fields of the extra config."""
    mem_layout: str = "page_first"
    page_tokens: int | None = None
    served_model_name: str | None = None
    pass_prefix_keys: bool = False

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """Return the choice that parsed command-line arguments describe. See `add_arguments`.

        The flags of a server with this project's adapter choose the backend below the adapter, which
        itself runs only in SGLang.

        Raises:
            ConfigError: No backend is named, or the extra config is wrong.
        """
        if not arguments.hicache_storage_backend:
            raise ConfigError(f"{_BACKEND} is required; `hicache backends` lists the names")
        backend = arguments.hicache_storage_backend
        config = load_extra_config(arguments.hicache_storage_backend_extra_config)
        fields = _pop_engine_fields(config)
        if backend == "dynamic" and _names_our_adapter(config):
            backend, config = _below_adapter(config)
        return cls(
            backend=backend,
            mem_layout=arguments.hicache_mem_layout,
            page_tokens=arguments.page_size,
            served_model_name=arguments.served_model_name,
            pass_prefix_keys=fields.pop("pass_prefix_keys", False),
            controller=ControllerSettings(
                prefetch_policy=PrefetchPolicy(arguments.hicache_storage_prefetch_policy),
                write_policy=WritePolicy(arguments.hicache_write_policy),
                **fields,
            ),
            config=config,
        )

    def open(self, *, read_only: bool = False) -> HiCacheStorage:
        """Open the storage. The caller closes it. See `registry.open_storage` for the errors."""
        from hicache_storage.registry import open_storage  # noqa: PLC0415 - a program that only parses flags starts quickly

        return open_storage(self.backend, self.config, read_only=read_only)


def load_extra_config(text: str | None, *, where: str = _EXTRA_CONFIG) -> dict[str, Any]:
    """Return the fields of inline JSON or of a file. Return {} if there is no text.

    Args:
        text: The JSON, or `@` and the name of a file, whose extension gives the format.
        where: The flag or field that `text` comes from, for messages.

    Raises:
        ConfigError: The message names the file and the reason. It never repeats `text`, which may
            contain a secret.
    """
    if not text:
        return {}
    if text.startswith("@"):
        return read_config_file(text[1:], where)
    return _check_fields(_parse(_parse_json, text, "JSON", where), where)


def read_config_file(name: str, flag: str) -> dict[str, Any]:
    """Return the fields of a .json, .toml, .yaml or .yml file that `flag` names.

    Raises:
        ConfigError: The message names the flag, the file and the reason.
    """
    where = f"{flag}: {shown(name)}"
    try:
        path = Path(expand_home(name))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    if path.suffix not in _PARSERS:
        raise ConfigError(f"{where}: must end in one of {', '.join(_PARSERS)}")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: is not UTF-8 text") from None
    except ValueError:
        raise ConfigError(f"{where}: is not a file name") from None
    kind, parse = _PARSERS[path.suffix]
    return _check_fields(_parse(parse, content, kind, where), where)


class _RefusedError(ValueError):
    """The text is well-formed but cannot be a config."""


def _parse(parse: Callable[[str], Any], text: str, name: str, where: str) -> Any:
    try:
        value = parse(text)
        _check_values(value)
    except json.JSONDecodeError as error:
        reason = _MISSING_IN_JSON.get(error.msg) or error.msg.lower()
        at = f" at line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where}: is not {name}: {_unquoted(reason + at)}") from None
    except _RefusedError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not {name}: {_unquoted(str(error))}") from None
    return value


def _unquoted(reason: str) -> str:
    """Return a parser's message, or only the place in the file if the message may quote a secret."""
    if not _QUOTES.search(reason):
        return reason
    place = _PLACE.search(reason)
    return place[0] if place else "it cannot be read"


def _check_values(value: Any) -> None:
    """Refuse NaN, infinity and 1e999, which most parsers accept but no setting can use.

    Also refuse too many values, because YAML's aliases turn a few lines into any number of values.
    """
    for count, (name, item) in enumerate(_named_values(value, "it")):
        if isinstance(item, float) and not math.isfinite(item):
            raise _RefusedError(f"{shown(name)}: must be a finite number")
        if count > _MAX_VALUES:
            raise _RefusedError(f"it holds more than {_MAX_VALUES:,} values")


def _named_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield all values in order, each with the name of its field."""
    left = [(name, value)]
    while left:
        name, value = left.pop()
        yield name, value
        if isinstance(value, dict):
            fields: dict[Any, Any] = cast("Any", value)
            left += [(str(key), item) for key, item in reversed(fields.items())]
        elif isinstance(value, (list, tuple, set)):
            items: list[Any] = cast("Any", value)
            left += [(name, item) for item in reversed(list(items))]


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_fields, parse_int=_short_integer)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields. Refuse a repeated name, because `json` would drop the first value."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise _RefusedError(f"the field {shown(name)!r} is given twice")
        fields[name] = value
    return fields


def _short_integer(digits: str) -> int:
    """Return an integer. Refuse too many digits here, because Python's own message is hard to read."""
    if len(digits) > _MAX_JSON_DIGITS:
        raise _RefusedError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _parse_toml(text: str) -> Any:
    import tomllib  # noqa: PLC0415 - only @file.toml needs it

    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - only @file.yaml needs it

    class UniqueKeys(yaml.SafeLoader):
        """A loader that refuses a repeated key, because the library would keep only the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - the library's signature
            names: set[str] = set()
            if not isinstance(cast("Any", node), yaml.MappingNode):
                raise yaml.MarkedYAMLError(problem=_WRONG_TAG, problem_mark=node.start_mark)
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in names:
                    raise _RefusedError(f"the field {shown(key.value)!r} is given twice")
                if isinstance(key, yaml.ScalarNode):
                    names.add(key.value)
            return cast("dict[Any, Any]", super().construct_mapping(node, deep=deep))

    try:
        return yaml.load(text, UniqueKeys)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:  # the error's own text quotes the file and its secrets
        mark = error.problem_mark
        at = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{error.problem}{at}") from None
    except yaml.YAMLError:
        raise ValueError("it holds a character that YAML does not allow") from None
    except (
        LookupError,
        AttributeError,
        TypeError,
    ):  # raised for `!!int ""`, `!!bool x` and `!!timestamp x`
        raise ValueError(_WRONG_TAG) from None


_PARSERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".json": ("JSON", _parse_json),
    ".toml": ("TOML", _parse_toml),
    ".yaml": ("YAML", _parse_yaml),
    ".yml": ("YAML", _parse_yaml),
}


def _check_fields(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        raise ConfigError(f"{where}: must be an object with fields, but is empty")
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object with fields, not {type(value).__name__}")
    fields: dict[Any, Any] = cast("Any", value)
    other = [key for key in fields if not isinstance(key, str)]
    if other:
        raise ConfigError(f"{where}: a field's name must be a string, not {shown(other[0])}")
    return fields


# --- SGLang's own fields in the extra config (hybrid_cache_controller.py)
# --------------------------


def _pop_engine_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Remove SGLang's own fields from `config`. Return the checked values under this package's names."""
    found: dict[str, Any] = {}
    for knob, (name, check) in _ENGINE_FIELDS.items():
        if knob in config:
            found[name] = config.pop(knob)
            try:
                check(f"{_EXTRA_CONFIG}: {knob}:", found[name])
            except (TypeError, ValueError) as error:
                raise ConfigError(str(error)) from None
    return found


def _names_our_adapter(config: Mapping[str, Any]) -> bool:
    """Return whether SGLang would load this project's adapter, which needs no module and no class."""
    if "class_name" not in config and "module_path" not in config:
        return "backend_name" in config
    return config.get("module_path") == _SGLANG_ADAPTER


def _below_adapter(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of the backend below SGLang's adapter, and the backend's own fields."""
    name, below = config.get("backend_name"), config.get("config", {})
    if not isinstance(name, str) or not isinstance(below, dict):
        raise ConfigError(f"{_EXTRA_CONFIG}: backend_name must be a string, and config an object")
    return name, fields_of_backend(config, cast("dict[str, Any]", below))


def fields_of_backend(config: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backend's fields of SGLang's extra config: those in `below`, its `config`, come first."""
    others = {*SGLANG_FIELDS, "adapter", "config"}
    return {**{name: value for name, value in config.items() if name not in others}, **below}


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, not {type(value).__name__}")


_ENGINE_FIELDS: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "prefetch_threshold": ("prefetch_threshold_tokens", partial(check_integer, least=0)),
    "prefetch_timeout_base": ("prefetch_timeout_base_s", partial(check_seconds, zero=True)),
    "prefetch_timeout_per_ki_token": (
        "prefetch_timeout_per_ki_token_s",
        partial(check_seconds, zero=True),
    ),
    "hicache_storage_pass_prefix_keys": ("pass_prefix_keys", _check_flag),
}

"""KV-303: from_config refuses a wrong config at once, and names the wrong field."""

from __future__ import annotations

import copy
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hicache_conformance.checks import check
from hicache_conformance.run.outcomes import NotDeclared, NotVerified, Violation
from hicache_conformance.scenarios.attempts import error_text
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hicache_conformance.case.case import Case

_UNKNOWN = "conformance_no_such_field"
_TIMEOUT = "timeout_s"
_NO_VALUE = {"conformance": {"no": ["value", "of", "this", "field"]}}


@check("KV-303")
def unknown_fields_are_refused_by_name(case: Case) -> None:
    """An unknown field causes a ConfigError that names the field, whatever its value is."""
    values: tuple[Any, ...] = (1, "text", None, False, {}, [])
    for value in values:
        must_refuse(case, {**case.config, _UNKNOWN: value}, _UNKNOWN, "an unknown field")


@check("KV-303")
def misspelt_fields_are_refused_by_name(case: Case) -> None:
    """A field with two letters swapped is not ignored, but causes a ConfigError that names it."""
    for name in dict.fromkeys([*case.config, _TIMEOUT, "capacity_nbytes"]):
        misspelt = _misspelt(name)
        if misspelt not in case.config:
            config = {**case.config, misspelt: case.config.get(name, 5)}
            must_refuse(case, config, misspelt, f"{name!r} misspelt as {misspelt!r}")


@check("KV-303")
def values_of_a_wrong_type_are_refused_by_name(case: Case) -> None:
    """A mapping in place of a text, number or truth value causes a ConfigError that names the field."""
    plain = {
        name: value
        for name, value in case.config.items()
        if isinstance(value, (str, int, float, bool))
    }
    if accepts(case, {_TIMEOUT: 5.0}):
        plain[_TIMEOUT] = 5.0
    if not plain:
        raise NotDeclared("the config has no field whose value is a text, a number or a bool")
    for name, value in plain.items():
        for wrong in _wrong_values(value):
            config = {**case.config, name: wrong}
            must_refuse(case, config, name, f"{_kind(wrong)} in place of {_kind(value)}")


@check("KV-303")
def a_timeout_must_be_positive(case: Case) -> None:
    """If `timeout_s` is zero, negative or not a number, a ConfigError names it."""
    if not accepts(case, {_TIMEOUT: 5.0}):
        raise NotVerified("the store takes no `timeout_s`, which every store should have")
    for wrong in (0, 0.0, -1, -0.5, "soon", None, [1]):
        config = {**case.config, _TIMEOUT: wrong}
        must_refuse(case, config, _TIMEOUT, f"the timeout_s {wrong!r}")


@check("KV-303")
def a_missing_field_is_a_config_error(case: Case) -> None:
    """If a field that the store needs is missing, from_config raises ConfigError and no other error."""
    for name in case.config:
        rest = {key: value for key, value in case.config.items() if key != name}
        _must_be_config_error(case, rest, f"the field {name!r} missing")
    _must_be_config_error(case, {}, "every field missing")


def _must_be_config_error(case: Case, config: dict[str, Any], what: str) -> None:
    """Raise if a wrong config gives another error. A second fault ensures that the store can't open."""
    case.require_present("from_config")
    faults: list[dict[str, Any]] = [{_UNKNOWN: 1}]
    if accepts(case, {_TIMEOUT: 5.0}):
        faults.append({_TIMEOUT: -1})
    for fault in faults:
        error = refusal(case, {**config, **fault})
        if error is not None and not isinstance(error, ConfigError):
            raise Violation(
                f"from_config raised {type(error).__name__} with {what}",
                "a ConfigError that names the field",
                error_text(error),
                (f"from_config(config with {what})",),
            )


@check("KV-303")
def a_config_may_be_any_mapping(case: Case) -> None:
    """A config that is a Mapping but not a dict works."""
    error = refusal(case, MappingProxyType(case.config))
    if error is not None:
        raise Violation(
            "from_config fails with a config that is not a dict",
            "the same as with a dict of the same fields: its type is Mapping[str, Any]",
            error_text(error),
            ("from_config(types.MappingProxyType(config))",),
        )


@check("KV-303")
def a_config_is_left_as_it_was(case: Case) -> None:
    """from_config, calls and close leave the config unchanged."""
    config = copy.deepcopy(case.config)
    with case.subject.storage_class.from_config(config):
        pass
    if config != case.config or list(config) != list(case.config):
        changed = [
            name
            for name in {**config, **case.config}
            if config.get(name, case) != case.config.get(name, case)
        ]
        raise Violation(
            f"from_config changed the config that it was given: {', '.join(changed)}",
            "the mapping as it was: its owner may use it for the next rank",
            f"fields afterwards: {', '.join(config)}",
            ("from_config(config)",),
        )


def refusal(case: Case, config: Mapping[str, Any]) -> Exception | None:
    """Return the exception of from_config, or None if it opens a storage, which is then closed."""
    number = case.trace.began(f"from_config({{{', '.join(config)}}})")
    try:
        storage = case.subject.storage_class.from_config(config)
    except Exception as error:  # noqa: BLE001 - the caller judges it
        case.trace.ended(number, f"raised {type(error).__name__}")
        return error
    case.trace.ended(number, "a storage")
    with suppress(Exception):  # The checks of close judge this.
        storage.close()
    return None


def accepts(case: Case, more: Mapping[str, Any]) -> bool:
    """Return True if the case's config opens a store with these fields."""
    return not isinstance(refusal(case, {**case.config, **more}), ConfigError)


def must_refuse(case: Case, config: Mapping[str, Any], name: str, what: str) -> None:
    """Raise unless from_config refuses a config and names its wrong field `name`."""
    case.require_present("from_config")
    error = refusal(case, config)
    if isinstance(error, ConfigError) and name in str(error):
        return
    if error is None:
        message = f"from_config accepts {what}"
    elif isinstance(error, ConfigError):
        message = f"the ConfigError for {what} does not name the field"
    else:
        message = f"from_config raised {type(error).__name__} for {what}"
    raise Violation(
        message,
        f"ConfigError, at from_config, with {name!r} in its message",
        error_text(error) if error else "a storage",
        (f"from_config({{..., {name!r}: ...}})  # {what}",),
    )


def _misspelt(name: str) -> str:
    """Swap the first two different neighboring letters of `name` after its first letter."""
    for at in range(1, len(name) - 1):
        if name[at] != name[at + 1]:
            return f"{name[:at]}{name[at + 1]}{name[at]}{name[at + 2 :]}"
    return f"{name}x"


def _wrong_values(value: object) -> Iterator[object]:
    yield _NO_VALUE
    if not isinstance(value, str):
        yield "conformance: no value of this field"


def _kind(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, bool):
        return "a bool"
    return "a text" if isinstance(value, str) else "a number"

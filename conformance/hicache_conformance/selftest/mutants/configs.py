"""Wrong stores: what they make of a config, and where its secrets turn up."""

from __future__ import annotations

import copy
import difflib
from typing import TYPE_CHECKING, Any, Self

import pydantic

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf
from hicache_conformance.selftest.references.rented import Rented
from hicache_conformance.selftest.references.wire import WireStore
from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class _TalkativeSettings(DictSettings):
    """Shows what it was given when it is wrong, as pydantic does by default."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=False)


# --- wrong fields and values -------------------------------------------------------------------------


@caught_by("KV-303:unknown_fields_are_refused_by_name")
class IgnoresUnknownFieldsThatAreEmpty(DictStore):
    """An unknown field without a value is ignored."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({name: value for name, value in config.items() if value})


@caught_by("KV-303:misspelt_fields_are_refused_by_name")
class CorrectsMisspeltFields(DictStore):
    """It takes the field that comes nearest for the one that was meant."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        meant: dict[str, Any] = {}
        for name, value in config.items():
            near = difflib.get_close_matches(name, list(DictSettings.model_fields), n=1)
            meant[near[0] if near else name] = value
        return super().from_config(meant)


@caught_by("KV-303:values_of_a_wrong_type_are_refused_by_name", "KV-303:a_timeout_must_be_positive")
class ConvertsItsTimeoutTooLate(DictStore):
    """The timeout is made a number without a look at it: a text is a ValueError of float's."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        numbers = {"timeout_s": float(config["timeout_s"])} if "timeout_s" in config else {}
        return super().from_config({**config, **numbers})


@caught_by("KV-303:a_missing_field_is_a_config_error")
class RaisesKeyErrorForMissingFields(Shelf):
    """A missing field is a KeyError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({**config, "path": config["path"]})


@caught_by("KV-303:a_config_is_left_as_it_was")
class WritesIntoTheConfig(DictStore):
    """It writes its defaults into the config that it is given."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        store = super().from_config(config)
        if isinstance(config, dict):
            config.setdefault("timeout_s", 30.0)
        return store


@caught_by("KV-303:a_config_may_be_any_mapping")
class NeedsADict(DictStore):
    """It makes a deep copy of the config, which not every mapping allows."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(copy.deepcopy(config))


# --- secrets -----------------------------------------------------------------------------------------


@caught_by(
    "KV-303:unknown_secrets_are_not_repeated",
    "KV-303:wrong_values_are_not_repeated",
    seen_in="fsspec backend of this project, mended",
)
class RepeatsItInTheCause(DictStore):
    """Its ConfigError is careful, and its cause repeats the values: a traceback shows both."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return cls(_TalkativeSettings.model_validate(dict(config)))
        except pydantic.ValidationError as error:
            names = [".".join(map(str, detail["loc"])) for detail in error.errors()]
            raise ConfigError(f"dict: these fields are wrong: {', '.join(names)}") from error


@caught_by("KV-303:a_broken_url_is_not_repeated")
class RepeatsABrokenUrl(WireStore):
    """Its ConfigError for a URL that it can't read repeats the URL, with the password in it."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except ConfigError as error:
            raise ConfigError(f"{error}: {config.get('url')}") from None


@caught_by("KV-303:secrets_are_shown_nowhere")
class ShowsItsSettings(DictStore):
    """Its repr shows its settings, and the password is a plain text in them."""

    def __repr__(self) -> str:
        password = self._settings.password
        shown = password.get_secret_value() if password else None
        return f"{type(self).__name__}(password={shown!r})"


@caught_by("KV-303:secrets_are_shown_nowhere")
class ShowsAShortPassword(Rented):
    """Its repr shows the URL, with a password of two letters in it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={self._settings.url!r})"

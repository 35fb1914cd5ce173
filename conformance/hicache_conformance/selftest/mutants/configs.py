"""Wrong stores: what they make of a config, and where its secrets turn up."""

from __future__ import annotations

import copy
import difflib
import logging
from typing import TYPE_CHECKING, Any, Self

import pydantic

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictSettings, DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf, ShelfSettings
from hicache_conformance.selftest.references.wire import WireStore
from hicache_conformance.selftest.references.wire_settings import WireSettings
from hicache_storage.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.keys import KeySpace

logger = logging.getLogger(__name__)


class _TalkativeSettings(DictSettings):
    """Shows what it was given when it is wrong, as pydantic does by default."""

    model_config = pydantic.ConfigDict(hide_input_in_errors=False)


# --- wrong fields and values -------------------------------------------------------------------------


@caught_by("KV-303")
class IgnoresUnknownFields(DictStore):
    """It takes the fields that it knows, and ignores the others."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        known = {name: config[name] for name in config if name in DictSettings.model_fields}
        return super().from_config(known)


@caught_by("KV-303")
class IgnoresUnknownFieldsThatAreEmpty(DictStore):
    """An unknown field without a value is ignored."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({name: value for name, value in config.items() if value})


@caught_by("KV-303")
class CorrectsMisspeltFields(DictStore):
    """It takes the field that comes nearest for the one that was meant."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        meant: dict[str, Any] = {}
        for name, value in config.items():
            near = difflib.get_close_matches(name, list(DictSettings.model_fields), n=1)
            meant[near[0] if near else name] = value
        return super().from_config(meant)


@caught_by("KV-303")
class NamesNoField(DictStore):
    """Its ConfigError says that the config is wrong, and not where."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except ConfigError:
            raise ConfigError("dict: the config is invalid") from None


@caught_by("KV-303")
class RaisesTypeErrorForUnknownFields(Shelf):
    """It hands the config to its constructor as keyword arguments."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls._made(**config)

    @classmethod
    def _made(cls, path: str, timeout_s: float = 30.0) -> Self:
        return cls(ShelfSettings.parse("shelf", {"path": path, "timeout_s": timeout_s}))


@caught_by("KV-303")
class RaisesPydanticsError(DictStore):
    """The error of its settings is pydantic's own."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(DictSettings.model_validate(dict(config)))


@caught_by("KV-303")
class IgnoresMappings(DictStore):
    """A mapping in place of a plain value is ignored, and the default taken."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        plain = {
            name: value
            for name, value in config.items()
            if name not in DictSettings.model_fields or not isinstance(value, dict)
        }
        return super().from_config(plain)


@caught_by("KV-303")
class TakesNoTimeoutForNone(DictStore):
    """A timeout of 0 is taken, and means that it waits for ever."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        rest = {name: config[name] for name in config if name != "timeout_s" or config[name]}
        return super().from_config(rest)


@caught_by("KV-303")
class ConvertsItsTimeoutTooLate(DictStore):
    """The timeout is made a number without a look at it: a text is a ValueError of float's."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        numbers = {"timeout_s": float(config["timeout_s"])} if "timeout_s" in config else {}
        return super().from_config({**config, **numbers})


@caught_by("KV-303")
class ChecksItsConfigAtFirstUse(DictStore):
    """A wrong config is noticed by the first call, and not when the storage is opened."""

    _complaint: ConfigError | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except ConfigError as error:
            store = cls(DictSettings())
            store._complaint = error
            return store

    def open_space(self, space: KeySpace) -> None:
        if self._complaint:
            raise self._complaint
        super().open_space(space)


@caught_by("KV-303")
class RaisesKeyErrorForMissingFields(Shelf):
    """A missing field is a KeyError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({**config, "path": config["path"]})


@caught_by("KV-303")
class WritesIntoTheConfig(DictStore):
    """It writes its defaults into the config that it is given."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        store = super().from_config(config)
        if isinstance(config, dict):
            config.setdefault("timeout_s", 30.0)
        return store


@caught_by("KV-303")
class NeedsADict(DictStore):
    """It makes a deep copy of the config, which not every mapping allows."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config(copy.deepcopy(config))


# --- secrets -----------------------------------------------------------------------------------------


@caught_by("KV-303")
class RepeatsWhatItWasGiven(DictStore):
    """Its ConfigError repeats the values that were wrong, as pydantic's message does."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return cls(_TalkativeSettings.model_validate(dict(config)))
        except pydantic.ValidationError as error:
            raise ConfigError(str(error)) from None


@caught_by("KV-303")
class RepeatsItInTheCause(DictStore):
    """Its ConfigError is careful, and its cause repeats the values: a traceback shows both."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return cls(_TalkativeSettings.model_validate(dict(config)))
        except pydantic.ValidationError as error:
            names = [".".join(map(str, detail["loc"])) for detail in error.errors()]
            raise ConfigError(f"dict: these fields are wrong: {', '.join(names)}") from error


@caught_by("KV-303")
class RepeatsABrokenUrl(WireStore):
    """Its ConfigError for a URL that it can't read repeats the URL, with the password in it."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except ConfigError as error:
            raise ConfigError(f"{error}: {config.get('url')}") from None


@caught_by("KV-303")
class RaisesValueErrorForABrokenUrl(WireStore):
    """It takes its URL apart without care: a port that is no number is a ValueError."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        url = config.get("url")
        if isinstance(url, str):
            int(url.rpartition(":")[2].partition("/")[0])
        return super().from_config(config)


@caught_by("KV-303")
class ShowsItsSettings(DictStore):
    """Its repr shows its settings, and the password is a plain text in them."""

    def __repr__(self) -> str:
        password = self._settings.password
        shown = password.get_secret_value() if password else None
        return f"{type(self).__name__}(password={shown!r})"


@caught_by("KV-303")
class LogsItsConfig(DictStore):
    """It logs its config when it is opened, at DEBUG."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        logger.debug("opening with %s", config)
        return super().from_config(config)


@caught_by("KV-303")
class ComplainsWithItsPassword(WireStore):
    """When the server is not there, its error tells with what it tried to connect."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        try:
            return super().from_config(config)
        except StorageUnavailable as error:
            password = WireSettings.parse("wire", config).password
            shown = password.get_secret_value() if password else "no password"
            raise StorageUnavailable(f"wire: can't connect with {shown}") from error


@caught_by("KV-303")
class RepeatsAWrongPassword(DictStore):
    """Its ConfigError for a password that is no text repeats what was given instead."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        password = config.get("password")
        if not isinstance(password, (str, type(None))):
            raise ConfigError(f"dict: password: must be a text, not {password!r}")
        return super().from_config(config)


@caught_by("KV-303")
class PrintsItsPassword(DictStore):
    """It warns of a password in the config, and says which."""

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        if self._settings.password:
            logger.warning("not encrypted: %s", self._settings.password.get_secret_value())
        return super().batch_exists(space, hashes)

"""The config of `encrypted`, and reading the keys that it names."""

from __future__ import annotations

import re
from typing import Any, cast

from pydantic import field_validator, model_validator

from hicache_storage.backend_support.secret_sources import read_secret_file, read_secret_variable
from hicache_storage.settings import Field, FileName, PositiveSeconds, Settings

_KEY = re.compile(r"[0-9a-fA-F]{64}")

KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,47}")
"""The pattern of a key's id. Each sealed page contains the id of its key in plain text."""


class KeySource(Settings):
    """The place of a key. The key itself is 64 hex digits, as `openssl rand -hex 32` writes them."""

    file: FileName | None = None
    env: str | None = None
    """The environment variable that holds the key."""

    @model_validator(mode="after")
    def _check_one(self) -> KeySource:
        if (self.file is None) == (self.env is None):
            raise ValueError("give either file or env")
        return self

    def read(self, field: str) -> bytes:
        """Return the 32 bytes of the key.

        Raises:
            ValueError: There is no key. The message begins with `field` and never contains the key.
        """
        if self.file is not None:
            text = read_secret_file(f"{field}.file", self.file)
        else:
            text = read_secret_variable(f"{field}.env", self.env or "")
        if not _KEY.fullmatch(text):
            raise ValueError(
                f"{field}: a key has 64 hex digits: make one with openssl rand -hex 32"
            )
        return bytes.fromhex(text)


class EncryptedSettings(Settings):
    """The config of `encrypted`."""

    backend: str
    """The name of the backend that stores the sealed pages."""
    config: dict[str, Any] = Field(default_factory=dict, repr=False)
    """The config of the wrapped backend. It may contain secrets."""
    keys: dict[str, KeySource] = Field(min_length=1)
    """The keys that open pages, by id."""
    current_key: str
    """The id of the key that seals new pages."""
    name_key: str | None = None
    """The id of the key that seals names. None: the only key.

    If you change it, no stored page is found.
    """
    timeout_s: PositiveSeconds = 20.0
    """The time limit of each call. The backend gets half of it, because a get may also delete pages."""

    @field_validator("keys", mode="before")
    @classmethod
    def _check_key_ids(cls, keys: object) -> object:
        """Check the ids before an error can print one: a wrong id may be a key in the wrong place."""
        given = cast("dict[object, object]", keys)
        for key_id in given if isinstance(keys, dict) else ():
            if not isinstance(key_id, str) or not KEY_ID.fullmatch(key_id):
                raise ValueError("the id of a key has 1 to 47 letters, digits, '_', '.' or '-'")
        return given

    @model_validator(mode="after")
    def _check_ids(self) -> EncryptedSettings:
        if self.current_key not in self.keys:
            raise ValueError("current_key: must be one of keys")
        if self.name_key is None and len(self.keys) > 1:
            raise ValueError(
                "name_key: this field is required if keys has several: name the key with which"
                " the store was first written, because no other key finds its pages"
            )
        if self.name_key is not None and self.name_key not in self.keys:
            raise ValueError("name_key: must be one of keys")
        return self

    def read_keys(self) -> dict[str, bytes]:
        """Return the keys by id.

        Raises:
            ValueError: A key cannot be read or is malformed. The message names its field.
        """
        return {key_id: source.read(f"keys.{key_id}") for key_id, source in self.keys.items()}

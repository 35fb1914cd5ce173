"""Configs of all backends: settings, or a ConfigError that repeats no text of the config."""

from __future__ import annotations

import os
from typing import Any

from fuzz.choices import CANARY, Choices
from hicache_backends.file.settings import FileSettings
from hicache_backends.fsspec.settings import FsspecSettings
from hicache_backends.hf3fs.settings import Hf3fsSettings
from hicache_backends.memory.settings import MemorySettings
from hicache_backends.mooncake.settings import MooncakeSettings, parse_settings
from hicache_backends.redis.settings import RedisSettings
from hicache_backends.s3.settings import S3Settings

from hicache_storage.errors import ConfigError
from hicache_storage.events.settings import EventSettings
from hicache_storage.page_store.admission import AdmissionSettings
from hicache_storage.settings import Settings

_KINDS: tuple[type[Settings], ...] = (
    *(FileSettings, MemorySettings, RedisSettings, S3Settings, Hf3fsSettings, FsspecSettings),
    *(MooncakeSettings, EventSettings, AdmissionSettings),
)
_REQUIRED: dict[type[Settings], dict[str, Any]] = {
    FileSettings: {"path": "/kv"},
    RedisSettings: {"url": "redis://localhost"},
    S3Settings: {"bucket": "pages"},
    Hf3fsSettings: {"path": "/kv"},
    FsspecSettings: {"url": "memory://kv"},
    MooncakeSettings: {"master_server_address": "localhost:50051"},
    EventSettings: {"endpoint": "tcp://*:5557"},
}

SEEDS = (
    b"",
    *(
        bytes([kind, n, 9, n, 5, n, 6, 7, n]) + bytes(range(n, n + 20))
        for kind in range(9)
        for n in (1, 4)
    ),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.pick(_KINDS)
    config = {**_REQUIRED.get(kind, {}), **choices.fields(sorted(kind.model_fields))}
    try:
        found = parse_settings(config) if kind is MooncakeSettings else kind.parse("name", config)
    except ConfigError as error:
        assert CANARY not in str(error)
        assert str(error).startswith(("name: ", "mooncake: "))
        return

    assert found == kind.parse("name", dict(found))
    if isinstance(found, RedisSettings):
        _check_redis(found)
    elif isinstance(found, S3Settings):
        assert found.stall_s > 0
        assert all(name == name.lower() for name in found.write_headers)
    elif isinstance(found, FsspecSettings):
        assert f"{CANARY}@" not in found.shown_url
        assert found.protocol_name
    elif isinstance(found, MooncakeSettings):
        assert found.master is None or 0 < found.master[1] < 65536
    _check_hidden(found)


def _check_redis(settings: RedisSettings) -> None:
    assert 0 <= settings.address.port < 65536
    if settings.sentinel_master is None and settings.address.path is None:
        assert CANARY not in settings.place
    if settings.password_file or (settings.password_env or "") in os.environ:
        return
    if settings.is_tls or settings.sentinel_tls:
        return
    try:
        secret = settings.access().options.get("password")
        settings.sentinel_access(None)
    except ValueError as error:
        assert CANARY not in str(error)
        return
    assert not secret or secret in settings.secrets(secret)


def _check_hidden(settings: Settings) -> None:
    """Assert that the `repr` of settings shows no secret field."""
    text = repr(settings)
    for name in ("url", "password", "sentinel_password", "secret_access_key", "index"):
        value = getattr(settings, name, None)
        assert (
            not hasattr(value, "get_secret_value")
            or f"{name}=SecretStr('**********')" in text
            or (f"{name}=SecretStr('')" in text)
        )

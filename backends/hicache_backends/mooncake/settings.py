"""The config of `mooncake`: SGLang's fields, from the same sources as SGLang, and some more."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator, field_validator

from hicache_storage.errors import ConfigError
from hicache_storage.settings import Field, PositiveSeconds, Settings, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAST_PORT = 65535
_FILE_VARIABLE = "SGLANG_HICACHE_MOONCAKE_CONFIG_PATH"
_VARIABLES = {
    "master_server_address": "MOONCAKE_MASTER",
    "client_server_address": "MOONCAKE_CLIENT",
    "local_hostname": "MOONCAKE_LOCAL_HOSTNAME",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
    "master_metrics_port": "MOONCAKE_MASTER_METRICS_PORT",
    "check_server": "MOONCAKE_CHECK_SERVER",
    "standalone_storage": "MOONCAKE_STANDALONE_STORAGE",
    "enable_ssd_offload": "MOONCAKE_ENABLE_SSD_OFFLOAD",
    "ssd_offload_path": "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",
    "tenant_id": "MOONCAKE_TENANT_ID",
}
_WITH_UNIT = re.compile(r"([0-9.]+\s?)([kmgt])i?b?", re.IGNORECASE)


def _nbytes(value: object) -> int:
    """Parse a size in bytes. As in SGLang, units are powers of 1024: "4gb" is 4 GiB."""
    found = _WITH_UNIT.fullmatch(value.strip()) if isinstance(value, str) else None
    return parse_nbytes(f"{found[1]}{found[2].upper()}iB" if found else value)


_Size = Annotated[int, BeforeValidator(_nbytes)]


class MooncakeSettings(Settings):
    """The config of `mooncake`. A size is a number of bytes, or text: `4gb` is 4 GiB."""

    master_server_address: str = Field(min_length=1)
    """The address of the master: `host:port`, or `etcd://...` for several masters."""
    local_hostname: str = "localhost"
    """The name or address by which other processes reach this one."""
    metadata_server: str = "P2PHANDSHAKE"
    global_segment_size: _Size = Field(default=4 << 30, ge=0)
    """The memory that this process lends to the cluster. 0: the process is only a client."""
    local_buffer_size: _Size = Field(default=16 << 20, ge=1 << 20)
    """The size of the client library's own buffer. Pages do not pass through it."""
    protocol: Literal["tcp", "rdma"] = "rdma"
    device_name: str = ""
    """RDMA devices, separated by commas."""
    master_metrics_port: int = Field(default=9003, ge=1, le=_LAST_PORT)
    """The master's HTTP port, which lists keys."""
    check_server: bool = False
    """Accepted but has no effect: the master is always probed first."""
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    extra_backend_tag: str = Field(default="", max_length=200)
    """The beginning of every key. Programs with the same tag share pages."""
    replica_num: int = Field(default=1, ge=1, le=16)
    soft_pin_ttl_ms: int | None = Field(default=None, ge=1)
    """For how long a new page is evicted only if no other page can be. None: no soft pin."""
    preferred_segment: str = ""
    """The segment, `host:port`, that takes new pages while it has space."""
    timeout_s: PositiveSeconds = 10.0
    """The time limit of a call."""
    standalone_storage: Literal[False] = False
    enable_group_semantics: Literal[False] = False

    @field_validator("standalone_storage", "enable_group_semantics", mode="before")
    @classmethod
    def _off(cls, value: object) -> object:
        if str(value).lower() in ("false", "0", "no", ""):
            return False
        raise ValueError("is not supported here: leave it false")

    @field_validator("master_server_address")
    @classmethod
    def _address(cls, value: str) -> str:
        found = re.fullmatch(r"(\[.+\]|[^:\s]+):([0-9]{1,5})", value)
        if "://" not in value and (found is None or not 0 < int(found[2]) <= _LAST_PORT):
            raise ValueError("must be host:port")
        return value

    @property
    def master(self) -> tuple[str, int] | None:
        """The master's host and port, or None if masters are found through etcd."""
        if "://" in self.master_server_address:
            return None
        host, _, port = self.master_server_address.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def lends(self) -> bool:
        """True if the client lends memory or a disk. Only then does its close wait for the master."""
        return self.global_segment_size > 0 or self.enable_ssd_offload


def parse_settings(config: Mapping[str, Any]) -> MooncakeSettings:
    """Return the settings of `config`. If it names no master, add SGLang's file or environment.

    Raises:
        ConfigError: A field or the file is wrong.
    """
    fields = dict(config)
    if not fields.get("master_server_address"):
        fields = {**_sglang_fields(), **fields}
    if fields.get("client_server_address"):
        raise ConfigError(
            "mooncake: client_server_address: a standalone store client is not supported:"
            " name the master in master_server_address"
        )
    fields.pop("client_server_address", None)
    return MooncakeSettings.parse("mooncake", fields)


def _sglang_fields() -> dict[str, Any]:
    """Return the fields of SGLang's config file, or else of SGLang's environment variables."""
    path = os.environ.get(_FILE_VARIABLE)
    if path:
        return _read_file(Path(path))
    return {field: os.environ[name] for field, name in _VARIABLES.items() if os.environ.get(name)}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"mooncake: {_FILE_VARIABLE}: {path} cannot be read as JSON ({type(error).__name__})"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"mooncake: {_FILE_VARIABLE}: {path} must hold one JSON object")
    return cast("dict[str, Any]", found)

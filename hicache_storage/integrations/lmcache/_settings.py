"""The `adapter_params` of LMCache's plug-in adapter: settings of the adapter, fields of the backend."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator

from hicache_storage.errors import ConfigError
from hicache_storage.events.settings import EventSettings
from hicache_storage.integrations._backend_choice import backend_fields
from hicache_storage.integrations._jobs import JobSettings
from hicache_storage.integrations._metrics_settings import MetricsSettings
from hicache_storage.integrations._platform import PlatformSettings, platform_name, release_of
from hicache_storage.request_log import ExplainLogSettings
from hicache_storage.settings import Field, PositiveSeconds

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "lmcache"
_SERVER = re.compile(r"(0|[1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


def _check_server(label: str) -> str:
    found = _SERVER.fullmatch(label)
    if label and (found is None or int(found[1]) >= int(found[2])):
        raise ValueError('must be "i/n", server i (from 0) of n servers of one engine')
    return label


class AdapterSettings(JobSettings, MetricsSettings, ExplainLogSettings, PlatformSettings):
    """The fields in `adapter_params`. `backend` and `revision` are required."""

    backend: str = Field(min_length=1)
    """Name of the backend, for example "redis"."""
    config: dict[str, Any] | str = Field(default_factory=dict[str, Any], repr=False)
    """The backend's own fields, or "@" followed by the path of a file that has them (.json, .toml,
    .yaml)."""
    revision: str
    """The revision of the weights, or any text that changes with them. Empty if there is only one."""
    server: Annotated[str, AfterValidator(_check_server)] = ""
    """This server's place, such as "0/2", if one engine spans several LMCache servers over one store."""
    kv_dtype: str = ""
    """Logical type of KV that LMCache holds as uint8, for example "float8_e4m3fn"."""
    tenant: str = ""
    """Isolation domain. Servers of different tenants never share a page."""
    serde: dict[str, Any] = Field(default_factory=dict[str, Any], repr=False)
    """The object `serde` of --l2-adapter, if there is one."""
    checksum: Literal["xxh3", "none"] = "xxh3"
    parallelism: int | None = Field(default=None, ge=1)
    """Concurrent calls to the store in each direction. None: the backend's own number."""
    events: EventSettings | None = None
    """The publisher of KV events. None: no events. Needs the extra `events`."""
    shared: bool = True
    """False if only this host uses the store. LMCache shows this, and 0.5.7 can filter by it."""
    l1_read_ttl_s: PositiveSeconds = 300.0
    """The server's --l1-read-ttl-seconds."""
    l1_write_ttl_s: PositiveSeconds = 600.0
    """The server's --l1-write-ttl-seconds."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Parse `adapter_params`.

        Raises:
            ConfigError: The message names every wrong field and says why `revision` is required.
        """
        if "revision" not in params:
            raise ConfigError(
                f"{NAME}: revision: this field is required: LMCache's keys do not identify the"
                ' weights. Name their revision, for example "main-2026-11", and change the name whenever'
                ' they change; use "" if the weights behind this model\'s name never change'
            )
        settings = cls.parse(NAME, params)
        settings.backend_fields()
        return settings

    def backend_fields(self) -> dict[str, Any]:
        """Return the backend's own fields, from the file that `config` names, if it names one.

        Raises:
            ConfigError: The file cannot be read, or has no fields.
        """
        return backend_fields(self.config, f"{NAME}: config")

    def labelled_revision(self, version: str) -> str:
        """Return `revision`, with LMCache's release and the platform of this server.

        Raises:
            ConfigError: The chip family is unknown.
        """
        release = "shared" if self.share_between_releases else release_of(version)
        try:
            platform = self.platform or platform_name()
        except ConfigError as error:
            raise ConfigError(f"{NAME}: {error}") from error
        return f"{self.revision};lmcache={release};platform={platform}"

    def check_ttls(self) -> None:
        """Raise ConfigError if LMCache may give a buffer to another task before the deadlines.

        LMCache's locks of a buffer expire by time alone, even while the buffer is read or written.

        Raises:
            ConfigError: The message names the field.
        """
        for name, held_s, ttl, ttl_s in (
            ("store_timeout_s", self.store_timeout_s, "read", self.l1_read_ttl_s),
            ("load_timeout_s", self.load_timeout_s, "write", self.l1_write_ttl_s),
        ):
            if held_s > ttl_s / 2:
                raise ConfigError(
                    f"{NAME}: {name}: a buffer of LMCache may be in use for {held_s:g} s, which"
                    f" must be at most half of LMCache's {ttl} TTL of {ttl_s:g} s: lower it, or raise"
                    f" --l1-{ttl}-ttl-seconds of the server and l1_{ttl}_ttl_s here"
                )

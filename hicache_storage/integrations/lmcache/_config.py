"""The adapter's config. Its base class is added later, so that this module does not import LMCache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from hicache_storage.integrations.lmcache._settings import AdapterSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

_HELP = """\
HiCacheL2Adapter, fields of adapter_params:
- backend (str): name of the backend: file, redis, s3, ... (required)
- config (dict or str): the backend's own fields, or "@file" with them (.json, .toml, .yaml)
- revision (str): revision of the weights, which LMCache's keys do not name (required, may be "")
- server (str): "i/n" if one engine spans n LMCache servers over one store (default "")
- kv_dtype (str): type of KV that LMCache holds as uint8, e.g. "float8_e4m3fn" (default "")
- platform (str): vendor and chip family, e.g. "cuda-sm90" (default: that of this server)
- share_between_releases (bool): share pages with other releases of LMCache (default false)
- tenant (str): isolation domain (default "")
- serde (dict): the "serde" of this --l2-adapter, if it has one (default none)
- checksum (str): "xxh3" or "none" (default "xxh3")
- parallelism (int): concurrent calls to the store in each direction (default: the backend's number)
- shared (bool): false if the store is of this host alone (default true)
- lookup_timeout_s, load_timeout_s, store_timeout_s (float): deadlines (defaults 0.5, 2, 10)
- queued_nbytes (int or str): memory and queue of stores; more stores are dropped (default "256MiB")
- admission (dict): which objects are written: second_use, write_nbytes_per_s (default: all)
- switch_interval_s (float): Python's switch interval of LMCache's process (default 0.0001)
- metrics_port (int), metrics_host (str): where Prometheus scrapes the hicache_* metrics, which
  LMCache's /metrics has, too (default: nowhere else, 127.0.0.1)
- tracing (bool): OpenTelemetry spans of every call of the store (default false)
- events (dict): KV events of the store, for routers: endpoint, replay_endpoint, ... (default none)
- explain_log (str): file with the reasons for missing pages, for hicache explain (default none)
- log_file_nbytes (int or str): size at which that file is rotated (default "64MiB")
- l1_read_ttl_s (float): the server's --l1-read-ttl-seconds (default 300)
- l1_write_ttl_s (float): the server's --l1-write-ttl-seconds (default 600)
"""


class AdapterConfig:
    """The parsed `adapter_params` of a `HiCacheL2Adapter`."""

    def __init__(self, settings: AdapterSettings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Parse `adapter_params`.

        Raises:
            ConfigError: A field is wrong. This is a ValueError, as LMCache expects.
        """
        return cls(AdapterSettings.of(d))

    @classmethod
    def help(cls) -> str:
        """Return the description of the fields."""
        return _HELP

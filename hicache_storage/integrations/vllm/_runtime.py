"""Name the release of vLLM and the chips that it runs on, because the bytes of KV depend on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._platform import platform_name, release_of
from hicache_storage.integrations.vllm._settings import NAME

if TYPE_CHECKING:
    from hicache_storage.integrations.vllm._settings import TierSettings


class Runtime(NamedTuple):
    """vLLM's version and its `current_platform`. Asking that does not initialize a GPU."""

    version: str
    device: Any
    started_s: float | None = None
    """When this process started, if it is vLLM's own, which loads one model."""

    def labels(self, settings: TierSettings) -> str:
        """Return the part of `layout` that names the release and the chips.

        Raises:
            ConfigError: The chip family is unknown.
        """
        shared = settings.share_between_releases
        release = "shared" if shared else release_of(self.version)
        return f"vllm={release};platform={settings.platform or self._platform()}"

    def fp8_type(self, label: str) -> str:
        """Return the type of KV that vLLM calls `label`, such as "float8_e4m3fnuz" for `fp8_e4m3`.

        Raises:
            ConfigError: `label` does not name a format.
        """
        if label == "fp8":
            raise ConfigError(
                f"{NAME}: the KV type is fp8, which does not name a format: pass --kv-cache-dtype"
                ' fp8_e4m3 or fp8_e5m2, or set "kv_dtype": "float8_e4m3fn" in'
                " kv_connector_extra_config"
            )
        if not label.startswith("fp8"):
            return label
        own = str(self.device.fp8_dtype()).removeprefix("torch.")
        if label == "fp8_e4m3":
            return own
        # Kernels for AMD read some of the other formats as the chip's own type
        return f"{label}-{own}" if own != "float8_e4m3fn" else label

    def _platform(self) -> str:
        kind = str(self.device.device_type).partition(":")[0] or "cpu"
        family = ""
        if kind == "cuda":
            capability = self.device.get_device_capability()
            if capability is not None:
                prefix = "gfx" if self.device.is_rocm() else "sm"
                family = f"{prefix}{capability.major}{capability.minor}"
        elif kind != "cpu":
            family = str(self.device.get_device_name())
        try:
            return platform_name(kind, family)
        except ConfigError as error:
            raise ConfigError(f"{NAME}: {error}") from error

"""What only SGLang's server arguments know about the bytes of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.integrations.sglang._settings import AdapterSettings

# What changes KV under one served name, with the value that says nothing.
_TELLING = {
    "revision": None,
    "weight_version": "default",
    "quantization": None,
    "json_model_override_args": "{}",
    "dtype": "auto",
}
_DRAFT_TELLING = {
    "speculative_draft_model_revision": None,
    "speculative_draft_model_quantization": None,
}

# SGLang keeps these as bytes (KVCache.store_dtype), and host pools show only the bytes.
_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "mxfp8": "mxfp8"}


class Launch:
    """Weights, draft model and KV type of the server that this process is part of."""

    def __init__(self, arguments: Mapping[str, Any], settings: AdapterSettings) -> None:
        self._arguments = arguments
        self._settings = settings

    def revision(self, *, draft: bool, own_draft: str = "") -> str:
        """What tells these weights from others of the same name; with `draft`, of the draft too.

        `own_draft` is the draft model where no other is named: layers of the target's own checkpoint.

        Raises:
            ConfigError: There is a draft pool, and nobody says of which model.
        """
        parts = [self._settings.revision] if self._settings.revision else []
        parts += self._told(_TELLING)
        if draft:
            parts += [f"draft={self._draft_model(own_draft)}", *self._told(_DRAFT_TELLING)]
        return ";".join(parts)

    def byte_kv_dtype(self, pool: str) -> str:
        """The logical type of KV that pool `pool` holds as bytes.

        Raises:
            ConfigError: SGLang does not tell, and the config neither.
        """
        if self._settings.dtype:
            return self._settings.dtype
        label = self.kv_label(pool)
        if label not in _FP8:
            raise ConfigError(
                f"sglang: pool {pool!r} holds KV as bytes, and SGLang's kv_cache_dtype is {label!r},"
                ' which does not say what they are: pass --kv-cache-dtype, or set "adapter": {"dtype":'
                ' "float8_e4m3fn"} in the extra config'
            )
        return _FP8[label] if not _is_rocm() else f"{_FP8[label]}-rocm"

    def kv_label(self, pool: str) -> str:
        """SGLang's own word for the KV type, "auto" where it says no more."""
        own = self._arguments.get("speculative_draft_kv_cache_dtype")
        if pool.startswith("draft") and own:
            return str(own)
        return str(self._arguments.get("kv_cache_dtype") or "auto")

    def _draft_model(self, own: str) -> str:
        named = self._settings.draft_model
        path = named or self._arguments.get("speculative_draft_model_path") or own
        if not path:
            raise ConfigError(
                "sglang: there is KV of a draft model, and SGLang does not say of which: set"
                ' "adapter": {"draft_model": "org/name"} in the extra config'
            )
        return str(path)

    def _told(self, telling: Mapping[str, str | None]) -> list[str]:
        pairs = [(name, self._arguments.get(name), silent) for name, silent in telling.items()]
        return [f"{name}={value}" for name, value, silent in pairs if value and value != silent]


def _is_rocm() -> bool:
    """On AMD fp8 is another format on some chips, by the same name."""
    import torch  # noqa: PLC0415 - SGLang has loaded it

    return bool(torch.version.hip)

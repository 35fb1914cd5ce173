"""Properties of a page's bytes that are known only from SGLang's arguments and environment."""

from __future__ import annotations

import json
import logging
import os
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._platform import platform_name, release_of
from hicache_storage.integrations._weights import change_since, file_digest, weights_at
from hicache_storage.integrations.sglang import _arguments
from hicache_storage.integrations.sglang._variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hicache_storage.integrations.sglang._settings import AdapterSettings

logger = logging.getLogger(__name__)

FP8_TYPES: Mapping[str, str] = {
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "mxfp8": "float8_e4m3fn",
}
"""The types that SGLang stores as bytes (KVCache.store_dtype), by its own names, except on ROCm."""


class LaunchIdentity:
    """The weights, draft model and KV type of this process's server.

    A file is read by the first call that needs it, and the result is cached.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        settings: AdapterSettings,
        defaults: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        *,
        version: str = "",
        fp8_type: Callable[[str], str] = lambda label: FP8_TYPES.get(label, ""),
        loaded_at_s: float | None = None,
    ) -> None:
        """Read the environment.

        Args:
            arguments: SGLang's resolved arguments.
            settings: The adapter's settings.
            defaults: The defaults of the arguments in this release.
            variables: SGLang's environment variables, with their defaults in this release.
            version: SGLang's version.
            fp8_type: Function that returns the torch type of SGLang's name of an fp8 type.
            loaded_at_s: The earliest time at which the weights may have been loaded, if that was long
                ago. None: just now.
        """
        self._arguments = arguments
        self._settings = settings
        self._fp8_type = fp8_type
        self._release = "" if settings.share_between_releases else release_of(version)
        self._defaults = {} if settings.share_between_releases else defaults or {}
        names = variables or {}
        self._variables = VARIABLES.facts(names, names if settings.share_between_releases else None)
        self._loaded_at_s = loaded_at_s
        self._fingerprints: dict[str, str] = {}

    @property
    def has_local_ranks(self) -> bool:
        """Whether SGLang counts a rank's `tp_rank` among the ranks of one context-parallel rank."""
        return bool(self._arguments.get("enable_dp_attention"))

    def made_by(self, device: str) -> list[str]:
        """Return the texts for the platform and the release that compute KV on `device`.

        Raises:
            ConfigError: The platform is unknown.
        """
        device = device or str(self._arguments.get("device") or "")
        platform = self._settings.platform or platform_name(device)
        release = [f"sglang={self._release}"] if self._release else []
        return [f"platform={platform}", *release]

    def revision(self, *, draft: bool, own_draft: str = "") -> str:
        """Return a text that identifies the weights and, with `draft`, the draft model.

        `own_draft` stands for a draft model that is part of the target's own checkpoint. It is used if
        no other draft model is named.

        Raises:
            ConfigError: The model of a draft pool is unknown.
        """
        parts = [self._settings.revision] if self._settings.revision else []
        parts += self._values(_arguments.BY_VALUE)
        parts += self._load_format("load_format")
        parts += self._unclassified()
        parts += self._environment()
        parts += [part for name in _arguments.BY_DIGEST for part in self._file_digest(name)]
        parts += self._other_weights()
        parts += self._weights()
        parts += self._adapters()
        if draft:
            parts += [f"draft={self._draft_model(own_draft)}"]
            parts += self._values(_arguments.DRAFT_BY_VALUE)
            parts += self._load_format("speculative_draft_load_format")
            parts += [
                part for name in _arguments.DRAFT_BY_DIGEST for part in self._file_digest(name)
            ]
            parts += self._draft_weights()
        return ";".join(parts)

    def byte_kv_dtype(self, pool: str, device_dtype: str) -> str:
        """Return the logical type of KV that the pool stores as bytes.

        Args:
            pool: The pool's name.
            device_dtype: The type that the pool on the device computes with, which depends on the chip.
                "" if SGLang does not show that pool.

        Raises:
            ConfigError: Neither SGLang nor the config names the type.
        """
        label = self.kv_label(pool)
        found = device_dtype or self._fp8_type(label)
        if found.startswith("float8") and label in ("auto", *FP8_TYPES):
            return f"{label}-{found}" if label == "mxfp8" else found
        if self._settings.dtype:
            return self._settings.dtype
        raise ConfigError(
            f"sglang: pool {pool!r} holds KV as bytes, but SGLang's kv_cache_dtype {label!r} does not"
            " identify the type: pass --kv-cache-dtype, or set"
            ' "adapter": {"dtype": "float8_e4m3fn"} in the extra config'
        )

    def kv_label(self, pool: str) -> str:
        """Return SGLang's name for the KV type, or "auto" if no type is set."""
        own = self._arguments.get("speculative_draft_kv_cache_dtype")
        if pool.startswith("draft") and own:
            return str(own)
        return str(self._arguments.get("kv_cache_dtype") or "auto")

    def _draft_model(self, own: str) -> str:
        named = self._settings.draft_model
        path = named or self._arguments.get("speculative_draft_model_path") or own
        if not path:
            raise ConfigError(
                "sglang: there is KV of a draft model, but SGLang does not name the model: set"
                ' "adapter": {"draft_model": "org/name"} in the extra config'
            )
        return str(path)

    # --- parts of a revision -------------------------------------------------------------------------

    def _values(self, neutral_values: Mapping[str, Any]) -> Iterator[str]:
        for name, neutral in neutral_values.items():
            value = self._arguments.get(name)
            if value is not None and value != neutral:
                yield f"{name}={_text(value)}"

    def _environment(self) -> Iterator[str]:
        for name, text in self._variables.items():
            if text.startswith("file:"):
                self._require_unchanged(os.environ[name])
            yield f"{name}={text}"

    def _load_format(self, name: str) -> Iterator[str]:
        if self._arguments.get(name) in _arguments.OTHER_WEIGHTS:
            yield f"{name}={self._arguments[name]}"

    def _unclassified(self) -> Iterator[str]:
        """Yield arguments that are not classified yet, because KV may depend on them."""
        for name in sorted(set(self._arguments) - _arguments.KNOWN):
            value = self._arguments[name]
            if value is not None and value != self._defaults.get(name):
                logger.warning(
                    "this adapter has no entry for SGLang's argument %s: servers with another value"
                    " share no pages with this one",
                    name,
                )
                yield f"{name}={_text(value)}"

    def _file_digest(self, name: str) -> Iterator[str]:
        path = self._arguments.get(name)
        if not path:
            return
        if name not in self._fingerprints:
            try:
                digest = file_digest(str(path))
                self._require_unchanged(str(path))
                self._fingerprints[name] = digest
            except OSError as error:  # SGLang also continues without the file
                self._fingerprints[name] = f"unread:{path}"
                logger.warning("%s: %s cannot be read: %s", name, path, error.strerror)
        yield f"{name}={self._fingerprints[name]}"

    def _weights(self) -> Iterator[str]:
        path = self._arguments.get("model_path")
        if self._settings.weights:
            yield f"weights={self._settings.weights}"
        elif path:
            revision = self._arguments.get("revision")
            yield f"weights={self._fingerprint(str(path), revision) or f'named:{path}'}"

    def _draft_weights(self) -> Iterator[str]:
        path = self._arguments.get("speculative_draft_model_path")
        if path and not self._settings.draft_model:
            revision = self._arguments.get("speculative_draft_model_revision")
            if fingerprint := self._fingerprint(str(path), revision):
                yield f"draft_weights={fingerprint}"

    def _other_weights(self) -> Iterator[str]:
        for name in _arguments.BY_FINGERPRINT:
            if path := self._arguments.get(name):
                yield f"{name}={self._fingerprint(str(path), None) or f'named:{path}'}"

    def _adapters(self) -> Iterator[str]:
        """Yield the launch's LoRA adapters.

        Page hashes cover the names and paths of adapters, not their bytes.
        """
        named = [_adapter_of(entry) for entry in self._arguments.get("lora_paths") or ()]
        if named:
            adapters = [(name, path, self._fingerprint(path, None)) for name, path in named]
            yield f"lora={json.dumps(sorted(adapters))}"

    def _fingerprint(self, path: str, revision: str | None) -> str:
        key = f"{path}@{revision}"
        if key not in self._fingerprints:
            self._fingerprints[key] = self._read_fingerprint(path, revision)
        return self._fingerprints[key]

    def _read_fingerprint(self, path: str, revision: str | None) -> str:
        try:
            fingerprint = weights_at(path, revision, self._arguments.get("download_dir"))
            self._require_unchanged(path, revision)
        except OSError as error:
            raise ConfigError(
                f"sglang: the weights at {path} cannot be read: {error.strerror}. Make them readable, or"
                ' name them with "adapter": {"weights": "..."} in the extra config'
            ) from error
        if not fingerprint:
            logger.warning(
                "no weights were found at %s: only this name identifies them. Name them with"
                ' "adapter": {"weights": "..."} in the extra config if they may change under it',
                path,
            )
        return fingerprint

    def _require_unchanged(self, path: str, revision: str | None = None) -> None:
        """Refuse files that may not be the ones that this server has loaded.

        Raises:
            ConfigError: A file was changed after this server had been started.
        """
        if self._loaded_at_s is None:
            return
        where = self._arguments.get("download_dir")
        if change := change_since(self._loaded_at_s, path, revision, where):
            raise ConfigError(
                f"sglang: {change}, after this server was started, so it may compute with other bytes"
                " than those of the file: restart the server, or, for the model's own weights, name what"
                ' it has loaded with "adapter": {"weights": "..."} in the extra config'
            )


def _adapter_of(entry: Any) -> tuple[str, str]:
    """Return the name and path of an entry of `lora_paths`, a record of SGLang or command-line text."""
    if isinstance(entry, str):
        name, _, path = entry.partition("=")
        return name, path or name
    if isinstance(entry, dict):
        fields = cast("dict[str, Any]", entry)
        return str(fields.get("lora_name")), str(fields.get("lora_path"))
    return str(getattr(entry, "lora_name", entry)), str(getattr(entry, "lora_path", entry))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)

"""Properties of a page's bytes that are known only from SGLang's arguments and environment."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, cast

from hicache_storage.errors import ConfigError
from hicache_storage.integrations._weights import file_digest, weights_at
from hicache_storage.integrations.sglang import _arguments
from hicache_storage.integrations.sglang._variables import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hicache_storage.integrations.sglang._settings import AdapterSettings

logger = logging.getLogger(__name__)

# SGLang stores these types as bytes (KVCache.store_dtype), and host pools only show the byte type.
_FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "mxfp8": "mxfp8"}


class LaunchIdentity:
    """The weights, draft model and KV type of this process's server.

    A file is read by the first call that needs it, and the result is cached.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        settings: AdapterSettings,
        defaults: Mapping[str, Any] | None = None,
        variables: Iterable[str] = (),
    ) -> None:
        self._arguments = arguments
        self._settings = settings
        self._defaults = defaults or {}
        self._variables = VARIABLES.facts(variables)
        self._fingerprints: dict[str, str] = {}

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
        parts += [f"{name}={text}" for name, text in self._variables.items()]
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

    def byte_kv_dtype(self, pool: str) -> str:
        """Return the logical type of KV that the pool stores as bytes.

        Raises:
            ConfigError: Neither SGLang nor the config names the type.
        """
        if self._settings.dtype:
            return self._settings.dtype
        label = self.kv_label(pool)
        if label not in _FP8:
            raise ConfigError(
                f"sglang: pool {pool!r} holds KV as bytes, but SGLang's kv_cache_dtype"
                f" is {label!r}, which does not identify the type: pass --kv-cache-dtype, or set"
                ' "adapter": {"dtype": "float8_e4m3fn"} in the extra config'
            )
        return _FP8[label] if not _is_rocm() else f"{_FP8[label]}-rocm"

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
                self._fingerprints[name] = file_digest(str(path))
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


def _is_rocm() -> bool:
    """Return whether torch is AMD's build. Some AMD chips use a different fp8 format."""
    import torch  # noqa: PLC0415 - SGLang has loaded it

    return bool(torch.version.hip)

"""KV shapes of models: presets by name, other shapes by `--pool NAME:SHAPE`, smaller ones by scale.

The presets are unsharded and come from the models' public `config.json` (`num_hidden_layers`,
`num_key_value_heads`, `head_dim`; for MLA `kv_lora_rank` + `qk_rope_head_dim`). Each preset has a draft
of one layer in the target's own shape, as EAGLE heads (SafeAILab/EAGLE) and MTP layers
(`num_nextn_predict_layers`) do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.host_pool import PageShape

TARGET = "kv"

_MAX_DIGITS = 9
_MAX_SHRINKING = 16_384
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,18})?(?:[eE]-?[0-9]{1,2})?")
_FIELDS = {"mha": ("layers", "heads", "dim"), "mla": ("layers", "dim")}


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV cache of one token, as a shape."""

    kind: str
    """`mha` is K and V of `heads` x `dim`, `mla` is one latent vector of `dim`."""
    layers: int
    heads: int
    dim: int
    dtype: str = "bfloat16"

    def page(self, page_tokens: int) -> PageShape:
        """Return the shape of a page in a host pool.

        Raises:
            ConfigError: Host pools do not support the dtype.
        """
        from hicache_storage.host_pool import PageShape  # noqa: PLC0415 - `--help` needs no pool

        try:
            if self.kind == "mla":
                return PageShape.mla(
                    page_tokens=page_tokens, layers=self.layers, kv_dim=self.dim, dtype=self.dtype
                )
            return PageShape.mha(
                page_tokens=page_tokens,
                layers=self.layers,
                heads=self.heads,
                head_dim=self.dim,
                dtype=self.dtype,
            )
        except ValueError as error:
            raise ConfigError(f"pool shape {self}: {error}") from error

    def scaled(self, factor: float) -> KVShape:
        """Return a shape of about `factor` times the bytes. Reduce dim first, then heads and layers."""
        shrunk = self
        for name in ("dim", "heads", "layers"):
            size = getattr(self, name)
            smaller = max(1, round(size * min(1.0, factor)))
            factor = factor * size / smaller
            shrunk = replace(shrunk, **{name: smaller})
        return shrunk

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={getattr(self, name)}" for name in _FIELDS[self.kind])
        return f"{self.kind},{sizes},dtype={self.dtype}"


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool of a model, with its name and shape."""

    name: str
    shape: KVShape


@dataclass(frozen=True, slots=True)
class Preset:
    """A model that you can name with `--model`."""

    model: str
    """The model's id on Hugging Face."""
    target: KVShape

    @property
    def pools(self) -> tuple[PoolShape, ...]:
        """The pools of the target and of its draft."""
        return PoolShape(TARGET, self.target), PoolShape("draft", replace(self.target, layers=1))


PRESETS = {
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B-Instruct", KVShape("mha", 32, 8, 128)),
    "llama-3.1-70b": Preset("meta-llama/Llama-3.1-70B-Instruct", KVShape("mha", 80, 8, 128)),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", KVShape("mha", 36, 8, 128)),
    "qwen3-32b": Preset("Qwen/Qwen3-32B", KVShape("mha", 64, 8, 128)),
    "glm-4.5": Preset("zai-org/GLM-4.5", KVShape("mha", 92, 8, 128)),
    "deepseek-v3": Preset("deepseek-ai/DeepSeek-V3", KVShape("mla", 61, 1, 512 + 64)),
}


def parse_pool(text: str) -> PoolShape:
    """Parse `NAME:mha,layers=L,heads=H,dim=D[,dtype=T]` or `NAME:mla,layers=L,dim=D[,dtype=T]`.

    Raises:
        ConfigError: A part is invalid. The message names it.
    """
    where = f"--pool {shown(text)}"
    name, colon, shape = text.partition(":")
    if not (name and colon and shape) or shown(text) != text:
        raise ConfigError(f"{where}: must be NAME:SHAPE, e.g. kv:mha,layers=32,heads=8,dim=128")
    kind, *assignments = shape.split(",")
    if kind not in _FIELDS:
        raise ConfigError(f"{where}: unknown kind {kind!r}{did_you_mean(kind, sorted(_FIELDS))}")
    values = _assignments(assignments, [*_FIELDS[kind], "dtype"], where)
    missing = next((field for field in _FIELDS[kind] if field not in values), None)
    if missing:
        raise ConfigError(f"{where}: {missing}: this field is required, as in {missing}=8")
    sizes = {field: _size(field, values[field], where) for field in _FIELDS[kind]}
    heads = sizes.get("heads", 1)
    dtype = values.get("dtype", "bfloat16")
    return PoolShape(name, KVShape(kind, sizes["layers"], heads, sizes["dim"], dtype))


def check_pools(pools: Sequence[PoolShape]) -> tuple[PoolShape, ...]:
    """Check the pools of one cache. Return them with the target first.

    Raises:
        ConfigError: No pool is the target, or two pools have the same name.
    """
    names = [pool.name for pool in pools]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise ConfigError(f"--pool {duplicate}: is given twice: each pool has its own name")
    if TARGET not in names:
        raise ConfigError(f"--pool: the target model's pool, named {TARGET!r}, is missing")
    return tuple(sorted(pools, key=lambda pool: pool.name != TARGET))


def parse_scale(text: str) -> float:
    """Parse a scale: `1/64`, `0.015625` and `64` all make pages 64 times smaller.

    Raises:
        ValueError: The text is not a number greater than 0, or makes pages too small.
    """
    numerator, slash, denominator = text.partition("/")
    dividend, divisor = parse_number(numerator), parse_number(denominator if slash else "1")
    if not dividend or not divisor:
        raise ValueError(f"must be a number like 1/64, 0.015625 or 64, not {shown(text)!r}")
    factor = min(dividend / divisor, divisor / dividend)
    if factor < 1 / _MAX_SHRINKING:
        raise ValueError(
            f"must make pages at most {_MAX_SHRINKING:,} times smaller, not {shown(text)!r}"
        )
    return factor


def parse_number(text: str) -> float | None:
    """Parse a number such as 64, 0.015625 or 1e-3. Return None for any other text."""
    return float(text) if _NUMBER.fullmatch(text) else None


def _assignments(texts: Sequence[str], known: list[str], where: str) -> dict[str, str]:
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError(f"{where}: unknown field {name!r}{did_you_mean(name, known)}")
        if not value:
            raise ConfigError(f"{where}: {name}: must have a value, as in {name}=8")
        if name in values:
            raise ConfigError(f"{where}: {name}: is given twice")
        values[name] = value
    return values


def _size(name: str, text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) >= 1):
        raise ConfigError(f"{where}: {name}: must be a whole number, 1 or more, not {text!r}")
    return int(text)

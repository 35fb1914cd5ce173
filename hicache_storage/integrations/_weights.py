"""Compute a fingerprint of a checkpoint quickly. Equal weights have equal fingerprints on any host.

The fingerprint covers the model's configuration, and the name, the size and samples of the bytes of
every file of weights:

    safetensors    256 KiB of the header, and 4 KiB from the middle of up to 128 tensors
    other files    64 evenly spaced blocks of 4 KiB

Fine-tuning changes nearly every value of the tensors that it trains, so the samples differ. The samples
may miss a change of a few rows or tensors, so give such weights a name of their own. Times and paths do
not count, so copies have equal fingerprints.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_DIGITS = 32
_CONFIGS = (
    *("config.json", "params.json", "adapter_config.json"),
    *("hf_quant_config.json", "quantize_config.json", "quant_config.json"),
)
_INDEX = "model.safetensors.index.json"
# Kinds of files. Engines load the first kind that they find in a directory.
_KINDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_SAMPLE_NBYTES = 4096
_TENSORS = 128
_BLOCKS = 64
_CONCURRENT_FILES = 8
"""How many files are read at the same time. Small reads mostly wait for a network file system."""
_MAX_HEADER_NBYTES = 256 << 20
_NO_HEADER = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Exceptions for JSON that is not a safetensors header or index."""


def weights_at(path: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the fingerprint of a local checkpoint, or of a Hugging Face snapshot on this machine.

    Returns:
        Hex digits, or "" if there are no weights under this path or name.

    Raises:
        OSError: A file of weights cannot be read.
    """
    checkpoint = _local(path)
    if not checkpoint.exists():
        checkpoint = _snapshot(path, revision, download_dir) or checkpoint
    if checkpoint.is_file():
        return _digest([checkpoint], [])
    if not checkpoint.is_dir():
        return ""
    files = _weight_files(checkpoint)
    configs = [checkpoint / name for name in _CONFIGS if (checkpoint / name).is_file()]
    return _digest(files, configs) if files else ""


def file_digest(path: str) -> str:
    """Return the digest of a file's bytes.

    Raises:
        OSError: The file cannot be read.
    """
    return hashlib.sha256(_local(path).read_bytes()).hexdigest()[:_DIGITS]


def content_of(value: str) -> str:
    """Return the digest of the file that `value` names, or `value` if that is not a readable file."""
    try:
        return f"file:{file_digest(value)}" if _local(value).is_file() else value
    except (OSError, ValueError):  # not a path, or a path that only the engine can read
        return value


def _local(path: str) -> Path:
    """Return a local path. Expand `~` only if that home directory exists."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of pathlib raises RuntimeError


def _snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the local huggingface_hub directory of the model, or None. Do not download it."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        for config in _CONFIGS:  # the config of a model or of an adapter
            found = hub.try_to_load_from_cache(
                name, config, cache_dir=download_dir, revision=revision
            )
            if isinstance(found, str):
                return Path(found).parent
    except (ImportError, ValueError):  # no huggingface_hub, or the name is not a repository id
        return None
    return None


def _weight_files(checkpoint: Path) -> list[Path]:
    index = checkpoint / _INDEX
    if index.is_file():
        named = _named_by(index)
        if named and all((checkpoint / name).is_file() for name in named):
            return [checkpoint / name for name in named]
    for kind in _KINDS:
        if files := sorted(path for path in checkpoint.glob(kind) if path.is_file()):
            return files
    return []


def _named_by(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except _NO_HEADER:  # not an index
        return []


def _digest(files: list[Path], configs: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in configs:
        _add(digest, path.name.encode(), path.read_bytes())
    with ThreadPoolExecutor(_CONCURRENT_FILES) as readers:
        for path, sampled in zip(files, readers.map(_sampled_digest, files), strict=True):
            _add(digest, path.name.encode(), sampled)
    return digest.hexdigest()[:_DIGITS]


def _sampled_digest(path: Path) -> bytes:
    """Return a digest of one file's size and samples."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        _add(digest, struct.pack("<Q", size))
        for start in _sample_offsets(file, size):
            file.seek(start)
            _add(digest, struct.pack("<Q", start), file.read(_SAMPLE_NBYTES))
    return digest.digest()


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)


def _sample_offsets(file: BinaryIO, size: int) -> Iterator[int]:
    """Yield the offsets of the samples. Files of equal structure have equal offsets."""
    spans = _tensor_spans(file, size)
    if not spans:
        yield from (size * n // _BLOCKS for n in range(_BLOCKS))
        return
    data = spans[0][0]
    yield from range(0, min(data, _BLOCKS * _SAMPLE_NBYTES), _SAMPLE_NBYTES)
    count = min(_TENSORS, len(spans))
    for n in range(count):
        start, end = spans[len(spans) * n // count]
        yield max(start, (start + end - _SAMPLE_NBYTES) // 2)


def _tensor_spans(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Return (start, end) of each tensor in a safetensors file, in order.

    Return [] for any other file.
    """
    file.seek(0)
    head = file.read(8)
    nbytes = struct.unpack("<Q", head)[0] if len(head) == struct.calcsize("<Q") else 0
    if not 0 < nbytes <= min(size, _MAX_HEADER_NBYTES):
        return []
    try:
        header = cast("dict[str, Any]", json.loads(file.read(nbytes)))
        offsets = [
            entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
        ]
        base = 8 + nbytes
        spans = sorted((base + int(start), base + int(end)) for start, end in offsets)
    except _NO_HEADER:
        return []
    return spans if all(base <= start <= end <= size for start, end in spans) else []

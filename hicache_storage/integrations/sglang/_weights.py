"""A fingerprint of a checkpoint: cheap, and equal for equal weights wherever they lie.

The fingerprint covers the model's configuration, and of every file of weights its name, its size
and samples of its bytes: the header of a safetensors file (256 KiB of it) and 4 KiB from the middle
of up to 128 of its tensors, or 64 evenly spaced blocks of any other file. Fine-tuning changes
nearly every value of the tensors that it trains, so samples tell two sets of weights apart. What
changes a few rows or tensors alone may escape them, and needs a name. Times and paths are left out,
so copies are equal.
"""

from __future__ import annotations

import hashlib
import importlib
import json
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
# The first kind that a directory has is what is loaded from it.
_KINDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
_SAMPLE_NBYTES = 4096
_TENSORS = 128
_BLOCKS = 64
_FILES_AT_ONCE = 8
"""Small reads wait for a file system of the network, and for little else."""
_MOST_HEADER_NBYTES = 256 << 20


def weights_at(path: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Return the fingerprint of a local checkpoint, or of a Hugging Face snapshot on this machine.

    Returns:
        Hex digits, or "" where there are no weights to be seen under this path or name.

    Raises:
        OSError: A file of weights cannot be read.
    """
    place = Path(path).expanduser()
    if not place.exists():
        place = _snapshot(path, revision, download_dir) or place
    if place.is_file():
        return _digest([place], [])
    if not place.is_dir():
        return ""
    files = _weight_files(place)
    configs = [place / name for name in _CONFIGS if (place / name).is_file()]
    return _digest(files, configs) if files else ""


def file_digest(path: str) -> str:
    """Return the digest of a file's bytes.

    Raises:
        OSError: It cannot be read.
    """
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()[:_DIGITS]


def _snapshot(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return where huggingface_hub keeps the model on this machine; nothing is downloaded."""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
        for config in _CONFIGS:  # of a model, or of an adapter
            found = hub.try_to_load_from_cache(
                name, config, cache_dir=download_dir, revision=revision
            )
            if isinstance(found, str):
                return Path(found).parent
    except (ImportError, ValueError):  # not installed; or the name is no repository's
        return None
    return None


def _weight_files(place: Path) -> list[Path]:
    index = place / _INDEX
    if index.is_file():
        named = _named_by(index)
        if named and all((place / name).is_file() for name in named):
            return [place / name for name in named]
    for kind in _KINDS:
        if files := sorted(path for path in place.glob(kind) if path.is_file()):
            return files
    return []


def _named_by(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError):  # no index after all
        return []


def _digest(files: list[Path], configs: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in configs:
        _add(digest, path.name.encode(), path.read_bytes())
    with ThreadPoolExecutor(_FILES_AT_ONCE) as readers:
        for path, seen in zip(files, readers.map(_seen, files), strict=True):
            _add(digest, path.name.encode(), seen)
    return digest.hexdigest()[:_DIGITS]


def _seen(path: Path) -> bytes:
    """Return a digest of the size and the samples of one file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        _add(digest, struct.pack("<Q", size))
        for start in _sampled(file, size):
            file.seek(start)
            _add(digest, struct.pack("<Q", start), file.read(_SAMPLE_NBYTES))
    return digest.digest()


def _add(digest: Any, *parts: bytes) -> None:
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)


def _sampled(file: BinaryIO, size: int) -> Iterator[int]:
    """Yield where to read: the same places for files that are laid out alike."""
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
    """Return (start, end) of each tensor in a safetensors file, in order; [] in any other file."""
    file.seek(0)
    head = file.read(8)
    nbytes = struct.unpack("<Q", head)[0] if len(head) == struct.calcsize("<Q") else 0
    if not 0 < nbytes <= min(size, _MOST_HEADER_NBYTES):
        return []
    try:
        header = cast("dict[str, Any]", json.loads(file.read(nbytes)))
        offsets = [
            entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
        ]
        base = 8 + nbytes
        return sorted((base + int(start), base + int(end)) for start, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []

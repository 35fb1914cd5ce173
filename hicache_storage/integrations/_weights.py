"""Compute a fingerprint of a checkpoint quickly. Equal weights have equal fingerprints on any host.

The fingerprint covers the files of a model's directory that KV may depend on:

    *.json, *.py   all bytes, but not the tokenizer's files, the index, generation_config.json and
                   what training leaves behind
    safetensors    name, size, 256 KiB of the header, and 4 KiB from the middle of up to 128 tensors
    *.gguf, *.bin, *.pt, *.pth
                   name, size, and 64 evenly spaced blocks of 4 KiB

All files of weights count, because an engine's arguments choose which of them it loads. Code that
`auto_map` imports from another repository counts with its bytes if that repository is on this machine,
otherwise with its name.

Fine-tuning changes nearly every value of the tensors that it trains, so the samples differ. The samples
may miss a change of a few rows or tensors, so give such weights a name of their own. Times and paths do
not count, so copies have equal fingerprints.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import BinaryIO

_DIGITS = 32
_CONFIGS = ("config.json", "params.json", "adapter_config.json")
_INDEX = "model.safetensors.index.json"
_KINDS = ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
# KV is made of token ids, sampling comes after it, and the rest is left over from training.
_NOT_OF_KV = re.compile(
    r".*\.index\.json|generation_config\.json|tokenizer.*\.json|(chat_template|vocab|tekken)\.json"
    r"|(special_tokens_map|added_tokens|trainer_state|.*results)\.json"
    r"|(training_args|optimizer|scheduler|rng_state.*)\.(bin|pt|pth)"
)
_REPOSITORY = re.compile(r'"([^"]+?)--')
"""The repository in a value of `auto_map`, which is "repository--file.Class" or "file.Class"."""
_MOST_READ_NBYTES = 16 << 20
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
    files = _files_at(path, revision, download_dir)
    return _digest(files) if files.weights else ""


def change_since(
    since_s: float,
    path: str,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    downloads: bool = False,
) -> str:
    """Return which file of a fingerprint, or link to it, has changed after `since_s`, and when.

    Return "" if there is none. Ask after the fingerprint was read, so that no change is missed. With
    `downloads`, the engine itself may have downloaded the files since, and only a branch of a Hugging
    Face repository counts that has moved to other files.
    """
    files = _files_at(path, revision, download_dir)
    if not files.weights:
        return ""
    own = () if downloads else (files.root, *files.weights, *files.others)
    for each in (*own, *filter(Path.is_file, files.branches)):
        for step in _links_to(each):
            status = step.lstat()
            changed_s = max(status.st_mtime, status.st_ctime)
            if changed_s > since_s:
                at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(changed_s))
                return f"{step} changed at {at} (its bytes, or only its owner or mode)"
    return ""


def process_started_s() -> float:
    """Return when this process started, as a time of the clock that files have."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        age_s = time.process_time()
    return time.time() - age_s


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


class _Files(NamedTuple):
    """The files that a fingerprint covers."""

    root: Path
    weights: list[Path]
    others: Sequence[Path] = ()
    named: Sequence[str] = ()
    """Repositories of code that are not on this machine."""
    branches: Sequence[Path] = ()
    """The files that name the snapshots of Hugging Face repositories."""


def _files_at(path: str, revision: str | None, download_dir: str | None) -> _Files:
    root, branches = _local(path), list[Path]()
    if not root.exists() and (snapshot := _snapshot(path, revision, download_dir)):
        root, branches = snapshot, [_branch(snapshot, revision)]
    if root.is_file():
        return _Files(root, [root])
    if not root.is_dir():
        return _Files(root, [])
    kinds = (file for kind in _KINDS for file in root.glob(kind))
    weights = {file for file in kinds if file.is_file() and not _NOT_OF_KV.fullmatch(file.name)}
    named = [root / name for name in _named_by(root / _INDEX)]
    if all(file.is_file() for file in named):
        weights.update(named)
    configs = [file for file in root.glob("*.json") if not _NOT_OF_KV.fullmatch(file.name)]
    others, absent = [*sorted(configs), *sorted(root.rglob("*.py"))], list[str]()
    for repository in sorted(set(chain.from_iterable(map(_code_repositories, configs)))):
        code = _snapshot(repository, None, download_dir)
        others += [] if code is None else sorted(code.rglob("*.py"))
        branches += [] if code is None else [_branch(code, None)]
        absent += [repository] if code is None else []
    others = [file for file in others if file.is_file()]
    return _Files(root, sorted(weights), others, absent, branches)


def _branch(snapshot: Path, revision: str | None) -> Path:
    """Return the file of huggingface_hub that says which snapshot a branch is. A commit has none."""
    return snapshot.parent.parent / "refs" / (revision or "main")


def _code_repositories(config: Path) -> list[str]:
    """Return the repositories from which a config's `auto_map` imports code, as "repository--file"."""
    try:
        mapped = cast("list[object]", [*json.loads(config.read_bytes())["auto_map"].values()])
    except _NO_HEADER:  # no object, or no code
        return []
    names = _REPOSITORY.findall(json.dumps(mapped))
    return [*map(str, names)]


def _links_to(path: Path) -> Iterator[Path]:
    """Yield a path's file or directory, and each symbolic link on the way to it."""
    found, todo = set[Path](), [path.absolute()]
    while todo:
        each = todo.pop()
        for step in (each, *each.parents):
            if step not in found and step.is_symlink():
                found.add(step)
                todo.append(step.parent / step.readlink())
    yield from found
    yield path.resolve()


def _named_by(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, *_NO_HEADER):  # no index
        return []


def _digest(files: _Files) -> str:
    digest = hashlib.sha256()
    for path in files.others:  # a large one is data
        is_large = path.stat().st_size > _MOST_READ_NBYTES
        _add(digest, path.name.encode(), _sampled_digest(path) if is_large else path.read_bytes())
    for name in files.named:
        _add(digest, b"named", name.encode())
    weights = files.weights
    with ThreadPoolExecutor(_CONCURRENT_FILES) as readers:
        for path, sampled in zip(weights, readers.map(_sampled_digest, weights), strict=True):
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

"""Encrypted storages for tests, their keys, and back doors to their page files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hicache_backends.encrypted import EncryptedSettings, EncryptedStorage
from hicache_backends.encrypted.layout import Names, header_nbytes
from hicache_backends.file import FileStorage
from hicache_backends.memory import MemoryStorage

from hicache_storage.keys import KeySpace
from hicache_storage.storage import HiCacheStorage

KEYS = {"a": b"A" * 32, "b": b"B" * 32, "c": b"C" * 32}


def settings(keys: str = "a", **fields: Any) -> EncryptedSettings:
    """Return settings whose keys have the letters of `keys` as ids. The first key seals names."""
    named = {"backend": "memory", "current_key": keys[0], "name_key": keys[0], **fields}
    return EncryptedSettings.parse(
        "encrypted", {"keys": {key_id: {"env": "A_KEY"} for key_id in keys}, **named}
    )


def sealed_over(
    inner: HiCacheStorage | None = None, keys: str = "a", **fields: Any
) -> EncryptedStorage:
    """Return a storage around `inner`, or around a new `memory`, with `settings(keys, **fields)`."""
    own = {key_id: KEYS[key_id] for key_id in keys}
    return EncryptedStorage(inner or MemoryStorage(), settings(keys, **fields), own)


def over_files(root: Path, keys: str = "a", **fields: Any) -> EncryptedStorage:
    """Return a storage around `file` in `root`, which never overwrites a page."""
    return sealed_over(FileStorage.from_config({"path": str(root)}), keys, **fields)


def key_files(directory: Path, keys: str = "a") -> dict[str, Any]:
    """Write keys as files. Return the fields of a config that name them."""
    for key_id in keys:
        path = directory / f"{key_id}.key"
        path.write_text(f"{KEYS[key_id].hex()}\n")
        path.chmod(0o400)
    return {
        "keys": {key_id: {"file": str(directory / f"{key_id}.key")} for key_id in keys},
        "current_key": keys[0],
        "name_key": keys[0],
    }


def stored_under(space: KeySpace, page_hash: str, key: str = "a") -> tuple[KeySpace, str]:
    """Return the key space and the name under which the wrapped backend keeps a page."""
    sealed = Names(KEYS[key], header_nbytes(1)).sealed_space(space)
    return sealed.inner, sealed.names([page_hash])[0]


def page_file(root: Path, space: KeySpace, page_hash: str) -> Path:
    """Return the file in which `file` keeps a sealed page."""
    inner, name = stored_under(space, page_hash)
    return root / "spaces" / inner.id / name[:2] / name

"""Filesystems for the tests of `fsspec`: one that calls a test's hooks, and an object store."""

from __future__ import annotations

import asyncio
import errno
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hicache_backends.fsspec import FsspecStorage
from pages import hash_of, space

fsspec: Any = importlib.import_module("fsspec")  # fsspec has no types
MemoryFileSystem: Any = fsspec.get_filesystem_class("memory")

SPACE = space()
A, B = hash_of(1), hash_of(2)
SECRET = "correct horse battery"  # noqa: S105  # a secret to look for
LIMIT_S = 30.0


class Hooks:
    """Functions that a test adds to the calls of a filesystem."""

    before_write: Callable[[str], object] | None = None
    before_read: Callable[[str], object] | None = None
    before_remove: Callable[[str], object] | None = None
    before_look: Callable[[str], object] | None = None
    """Called before a listing, and before a size is looked up."""
    before_opening: Callable[[], object] | None = None


def hooked(hooks: Hooks, name: str, moment: str) -> Callable[..., Any]:
    """Return a method of the memory filesystem that calls a hook first."""
    method = getattr(MemoryFileSystem, name)

    def call(self: Any, path: str, *arguments: Any, **options: Any) -> Any:
        before = getattr(hooks, moment)
        if before is not None:
            before(path)
        return method(self, path, *arguments, **options)

    return call


class ObjectStore:
    """An object store with the calls of gcsfs and s3fs, whose failures a test switches on."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.per_name_s = 0.0
        """How long a listing takes for each name in it."""
        self.gone = False
        self.silent = False
        self.forbids_head_bucket = False

    async def ls(self, path: str, prefix: str = "", **_: Any) -> list[dict[str, Any]]:
        if self.silent:
            await asyncio.sleep(LIMIT_S)
        names = [name for name in self.files if name.startswith(f"{path}/{prefix}")]
        await asyncio.sleep(self.per_name_s * len(names))
        if not names:
            raise FileNotFoundError(path)
        return [{"name": name, "size": len(self.files[name]), "type": "file"} for name in names]

    async def find(self, path: str, *, prefix: str = "", **_: Any) -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in await self.ls(path, prefix)}

    async def info(self, path: str, **_: Any) -> dict[str, Any]:
        if self.silent:
            await asyncio.sleep(LIMIT_S)
        if self.forbids_head_bucket and path == "bucket":
            raise PermissionError(errno.EACCES, "no HeadBucket for you")
        if self.gone or (path != "bucket" and path not in self.files):
            raise FileNotFoundError(path)
        kind = "file" if path in self.files else "directory"
        return {"name": path, "size": len(self.files.get(path, b"")), "type": kind}

    async def cat_file(self, path: str, **_: Any) -> bytes:
        await self.info(path)
        return self.files[path]

    async def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.files[path] = value

    async def rm_file(self, path: str, **_: Any) -> None:
        await self.info(path)
        del self.files[path]


def open_store(url: str, **fields: Any) -> FsspecStorage:
    store = FsspecStorage.from_config({"url": url, **fields})
    store.open_space(SPACE)
    return store


def raising(error: Exception) -> Callable[[str], None]:
    def raise_it(_: str) -> None:
        raise error

    return raise_it


def page_file(root: Path, page_hash: str) -> Path:
    return root / "kv" / SPACE.id / page_hash


def register_scripted() -> Hooks:
    """Register `scripted://`, an empty filesystem of no known kind. Return the hooks of its calls."""
    hooks = Hooks()

    def begin(self: Any, *, taste: str = "") -> None:
        if hooks.before_opening is not None:
            hooks.before_opening()
        MemoryFileSystem.__init__(self, taste=taste)

    own: dict[str, Any] = {
        "protocol": "scripted",
        "store": {},
        "pseudo_dirs": [""],
        "__init__": begin,
        "pipe_file": hooked(hooks, "pipe_file", "before_write"),
        "cat_file": hooked(hooks, "cat_file", "before_read"),
        "rm_file": hooked(hooks, "rm_file", "before_remove"),
        "ls": hooked(hooks, "ls", "before_look"),
        "info": hooked(hooks, "info", "before_look"),
    }
    kind = type("Scripted", (MemoryFileSystem,), own)
    fsspec.register_implementation("scripted", kind, clobber=True)
    return hooks


def filesystem_class_over(store: ObjectStore) -> type:
    """Return the class of an asynchronous filesystem over `store`."""

    def passed_on(name: str) -> Callable[..., Any]:
        async def call(_: Any, *arguments: Any, **options: Any) -> Any:
            return await getattr(store, name)(*arguments, **options)

        return call

    own: dict[str, Any] = {"protocol": "gs", "async_impl": True}
    for name in ("ls", "find", "info", "cat_file", "pipe_file", "rm_file"):
        own[f"_{name}"] = passed_on(name)
    parent: Any = importlib.import_module("fsspec.asyn").AsyncFileSystem
    return type("OverObjectStore", (parent,), own)

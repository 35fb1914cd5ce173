"""The package that `hicache-conformance new NAME` writes: a simple, correct store with its kit test."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError, install_command
from hicache_storage.registry import DYNAMIC, backends

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LONGEST_NAME = 40

_STORAGE = '''\
"""The storage `@name@`: PATH/SPACE/HASH has a page, PATH/SPACE/manifest.json has its key space."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self

from hicache_storage import (
    Capabilities,
    Durability,
    HiCacheStorage,
    KeySpace,
    Page,
    PageInfo,
    Retention,
    StorageUnavailable,
)
from hicache_storage.backend_support import manifest
from hicache_storage.settings import Field, PositiveSeconds, Settings

_MANIFEST = "manifest.json"


class @Class@Settings(Settings):
    path: Annotated[str, Field(min_length=1, pattern=r"^[^\\x00]+$", description="text without NUL")]
    timeout_s: PositiveSeconds = 30.0  # every backend has this field


class @Class@Storage(HiCacheStorage):
    capabilities = Capabilities(
        retention=Retention.UNTIL_DELETED,  # nothing evicts
        durability=Durability.CRASH,  # a page is written aside and renamed
        shared=True,  # other processes see the directory
        enumerable=True,  # the directory can be listed
    )
    usable_after_fork = True  # nothing stays open between two calls

    def __init__(self, settings: @Class@Settings) -> None:
        self._root = Path(settings.path).expanduser().absolute()
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for path in self._root.glob("*/.new-*"):
                with suppress(FileNotFoundError):  # its writer has finished
                    if time.time() - path.stat().st_mtime > 3600:  # no writer takes an hour
                        path.unlink()
        except OSError as error:
            raise StorageUnavailable(f"@name@: {self._root}: {error.strerror}") from error

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(@Class@Settings.parse("@name@", config))

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return [_size(self._path(space, one)) == space.stored_nbytes for one in hashes]

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        return [self._get(self._path(space, h), p) for h, p in zip(hashes, pages, strict=True)]

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        self.ensure_open()
        path = self._path(space, _MANIFEST)
        known = path.exists() or self._write(path, manifest.encode_manifest(space))
        return [
            known and self._write(self._path(space, h), page.tobytes())
            for h, page in zip(hashes, pages, strict=True)
        ]

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        self.ensure_open()
        return [self._delete(self._path(space, page_hash)) for page_hash in hashes]

    def spaces(self) -> Iterator[KeySpace]:
        self.ensure_open()
        for folder in self._list(self._root, manifest.SPACE_ID):
            data = _read(folder / _MANIFEST)  # a directory without a manifest is not ours
            if space := manifest.decode_manifest(data, space_id=folder.name):
                yield space

    def scan(self, space: KeySpace) -> Iterator[PageInfo]:
        self.ensure_open()
        for path in self._list(self._root / space.id, manifest.PAGE_HASH):
            if (nbytes := _size(path)) is not None:
                yield PageInfo(path.name, nbytes)

    def _path(self, space: KeySpace, name: str) -> Path:
        return self._root / space.id / name

    def _get(self, path: Path, page: Page) -> bool:
        data = _read(path)
        if data is None or len(data) != page.nbytes:
            return False  # damaged: the next set replaces it
        page.copy_from(data)
        return True

    def _write(self, path: Path, data: bytes) -> bool:
        new = path.with_name(f".new-{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(exist_ok=True)
            new.write_bytes(data)
            new.replace(path)
        except OSError:
            self._delete(new)
            return False
        return True

    def _delete(self, path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError:
            return False  # the file may still be there
        return True

    def _list(self, folder: Path, name: re.Pattern[str]) -> list[Path]:
        try:
            return [path for path in folder.iterdir() if name.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageUnavailable(f"@name@: {folder}: {error.strerror}") from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
'''

_INIT = '''\
"""The storage `@name@` for hicache-storage."""

from @package@.storage import @Class@Settings, @Class@Storage

__all__ = ["@Class@Settings", "@Class@Storage"]
'''

_TEST = '''\
"""The rules of the storage contract, as tests of `@name@`."""

from __future__ import annotations

from typing import Any

from hicache_conformance import Scratch, StorageConformance

from @package@ import @Class@Storage


class Test@Class@(StorageConformance):
    storage_class = @Class@Storage

    def config(self, scratch: Scratch) -> dict[str, Any]:
        return {"path": str(scratch.path / "pages")}
'''

_PROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "hicache-@name@"
version = "0.1.0"
description = "The storage @name@ for hicache-storage"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["hicache-storage"]

[project.optional-dependencies]
test = ["hicache-storage[conformance]"]

[project.entry-points."hicache_storage.backends"]
@name@ = "@package@:@Class@Storage"

[tool.hatch.build.targets.wheel]
packages = ["@package@"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]
"""

_README = """\
# hicache-@name@

The storage `@name@` for hicache-storage: one file a page, under the directory `path`.
Install the kit first: @install@.

    pip install -e '.[test]'
    pytest --hicache-quick           # most checks of the contract's rules, in some minutes
    pytest --hicache-report out      # all of them, in about three times as long: a verdict
    hicache-conformance --quick --hicache-storage-backend @name@ \\
      --hicache-storage-backend-extra-config '{"path": "{scratch}/pages"}'

| file | content |
|---|---|
| `@package@/storage.py` | the class, its settings and its claims (`capabilities`) |
| `tests/test_conformance.py` | the kit's tests of this class |
| `.github/workflows/conformance.yml` | the same on each push and each week; it publishes the badge |
| `pyproject.toml` | the entry point, by which `--hicache-storage-backend @name@` finds the class |

Replace the methods of `storage.py` with those of your own store, one at a time, and run the tests after
each. The guide for backend authors of hicache-storage explains the rules, and shows a store behind a
server.

A store that keeps its pages elsewhere needs back doors in the test class (`peek`, `tamper`, `server`,
`stall`, `small_config`). The kit says which checks lack one.

The badge, once the workflow has run on the branch `main` (put your own OWNER and REPOSITORY):

    https://img.shields.io/endpoint?url=https://raw.githubusercontent.com/OWNER/REPOSITORY/badges/badge.json
"""

_WORKFLOW = """\
# The rules of the storage contract: quick on a pull request, whole elsewhere.
name: conformance
on:
  push:
    branches: [main]
  pull_request:
  schedule:
    - cron: "17 3 * * 1"
permissions:
  contents: read

jobs:
  conformance:
    runs-on: ubuntu-latest
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
      - run: pip install -e '.[test]'
      - run: pytest --hicache-report out $QUICK
        env:
          QUICK: ${{ github.event_name == 'pull_request' && '--hicache-quick' || '' }}
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: conformance, path: out}

  # The branch `badges` has nothing but badge.json, of the last whole run.
  badge:
    needs: conformance
    if: always() && github.ref == 'refs/heads/main'
    runs-on: ubuntu-latest
    permissions:
      contents: write
    steps:
      - uses: actions/download-artifact@v4
        with: {name: conformance, path: out}
      - name: publish badge.json
        env:
          GH_TOKEN: ${{ github.token }}
        run: |
          git init -q badges && cd badges
          cp ../out/Test@Class@/badge.json .
          git add badge.json
          git -c user.name=conformance -c user.email=conformance@localhost commit -qm "badge"
          git push -qf "https://x-access-token:$GH_TOKEN@github.com/$GITHUB_REPOSITORY" HEAD:badges
"""

_FILES = {
    "pyproject.toml": _PROJECT,
    "README.md": _README,
    "@package@/__init__.py": _INIT,
    "@package@/py.typed": "",
    "@package@/storage.py": _STORAGE,
    "tests/test_conformance.py": _TEST,
    ".github/workflows/conformance.yml": _WORKFLOW,
}


def write_package(name: str, parent: Path) -> Path:
    """Write the package `hicache-NAME` into `parent` and return its directory.

    Raises:
        ConfigError: A backend can't have this name, or the directory exists.
    """
    _check_name(name)
    directory = parent / f"hicache-{name}"
    package = f"hicache_{name.replace('-', '_')}"
    class_name = "".join(part.capitalize() for part in name.split("-"))
    values = {"@package@": package, "@Class@": class_name, "@name@": name}
    values["@install@"] = install_command("conformance")
    try:
        directory.mkdir()
        for path, text in _FILES.items():
            target = directory / path.replace("@package@", package)
            target.parent.mkdir(parents=True, exist_ok=True)
            for placeholder, value in values.items():
                text = text.replace(placeholder, value)  # noqa: PLW2901 - as often as there are values
            target.write_text(text, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{directory} exists: choose another name or directory") from None
    except OSError as error:
        raise ConfigError(f"{directory} can't be written: {error.strerror}") from error
    return directory


def _check_name(name: str) -> None:
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name[:_LONGEST_NAME]!r} is not a name for a backend: use up to {_LONGEST_NAME}"
            " lowercase letters and digits, with dashes between them, such as acme or acme-kv"
        )
    known = backends()
    if name == DYNAMIC or name in known:
        owner = known[name].distribution if name in known else "the registry"
        raise ConfigError(f"the backend {name!r} exists already, in {owner}: choose another name")

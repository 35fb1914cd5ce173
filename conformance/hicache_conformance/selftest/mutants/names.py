"""Stores that make something else of a model's name."""

from __future__ import annotations

import posixpath
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hicache_conformance.selftest.mutants import caught_by
from hicache_conformance.selftest.references.dict_store import DictStore
from hicache_conformance.selftest.references.file_a_page import Shelf

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hicache_storage.keys import KeySpace


class _Misnamed(DictStore):
    """A store that makes something else of a model's name."""

    def _key(self, space: KeySpace, page_hash: str) -> Hashable:
        return replace(space, model=f"/{self._name(space.model)}"), page_hash

    def _name(self, model: str) -> str:
        return model


@caught_by("KV-105")
class SlashesFlattened(_Misnamed):
    """`/` in a model's name becomes `-`: `a/b-c` and `a-b/c` are one."""

    def _name(self, model: str) -> str:
        return model.replace("/", "-")


@caught_by("KV-105")
class UnderscoresForOdd(_Misnamed):
    """Whatever is no letter, digit or slash becomes `_`."""

    def _name(self, model: str) -> str:
        return "".join(one if one.isalnum() or one == "/" else "_" for one in model)


@caught_by("KV-105")
class NamesCut(_Misnamed):
    """Names are cut at 255 characters."""

    def _name(self, model: str) -> str:
        return model[:255]


@caught_by("KV-105")
class NamesCutInFront(_Misnamed):
    """Of long names the last 255 bytes are kept."""

    def _name(self, model: str) -> str:
        return model.encode()[-255:].decode(errors="ignore")


@caught_by("KV-105")
class LongNamesFail(DictStore):
    """A name of more than 255 bytes is an OSError, as file systems have it."""

    def open_space(self, space: KeySpace) -> None:
        if len(space.model.encode()) > 255:
            raise OSError(36, "File name too long", space.model)
        super().open_space(space)


@caught_by("KV-105")
class NamesFolded(_Misnamed):
    """Upper and lower case are one, as on some file systems."""

    def _name(self, model: str) -> str:
        return model.casefold()


@caught_by("KV-105")
class NamesComposed(_Misnamed):
    """Names are normalised to NFC, as on some file systems."""

    def _name(self, model: str) -> str:
        return unicodedata.normalize("NFC", model)


@caught_by("KV-105")
class NamesCompatible(_Misnamed):
    """Names are normalised to NFKC, in which a ligature is its letters."""

    def _name(self, model: str) -> str:
        normal = unicodedata.normalize("NFKC", model)
        return model if unicodedata.normalize("NFC", model) == normal else normal


@caught_by("KV-105")
class NamesStripped(_Misnamed):
    """Spaces around a name are stripped."""

    def _name(self, model: str) -> str:
        return model.strip()


@caught_by("KV-105")
class NamesInAscii(_Misnamed):
    """What is not ASCII becomes a question mark."""

    def _name(self, model: str) -> str:
        return model.encode("ascii", "replace").decode()


@caught_by("KV-105")
class NamesUnquoted(_Misnamed):
    """Names pass through a URL, and are unquoted once too often."""

    def _name(self, model: str) -> str:
        return unquote(model)


@caught_by("KV-105")
class NamesAsPaths(_Misnamed):
    """Names are paths, and normalised as such."""

    def _name(self, model: str) -> str:
        return posixpath.normpath(model)


@caught_by("KV-105")
class NamesListedInAscii(Shelf):
    """The manifest of a key space has its model's name in ASCII only."""

    def _known_spaces(self) -> list[KeySpace]:
        found = super()._known_spaces()
        return [
            replace(space, model=space.model.encode("ascii", "replace").decode()) for space in found
        ]


@caught_by("KV-105")
class NamesEscape(Shelf):
    """The directory of a key space is named by its model: `..` leads out of the store's own."""

    def _folder(self, space: KeySpace) -> Path:
        folder = self._root.joinpath(*(part[:60] for part in Path(space.model).parts), space.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

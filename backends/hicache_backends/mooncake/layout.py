"""The keys of objects.

TAG/ID/manifest     a description of key space ID, as JSON
TAG/ID/HASH         one page

Without a tag, a key begins with ID. The backend never touches an object with any other key.
"""

from __future__ import annotations

from hicache_storage.backend_support.manifest import PAGE_HASH, SPACE_ID

_MANIFEST = "manifest"


class Layout:
    """The keys of one `extra_backend_tag`. Immutable."""

    __slots__ = ("prefix",)

    def __init__(self, tag: str) -> None:
        self.prefix = f"{tag}/" if tag else ""

    def root(self, space_id: str) -> str:
        """Return the prefix of every key in a key space."""
        return f"{self.prefix}{space_id}/"

    def page(self, space_id: str, page_hash: str) -> str:
        return f"{self.prefix}{space_id}/{page_hash}"

    def manifest(self, space_id: str) -> str:
        return f"{self.prefix}{space_id}/{_MANIFEST}"

    def page_hash(self, space_id: str, key: str) -> str | None:
        """Return the page hash if `key` is a page's key, else None."""
        page_hash = key.removeprefix(self.root(space_id))
        return page_hash if PAGE_HASH.fullmatch(page_hash) else None

    def owner(self, key: str) -> str | None:
        """Return the key-space id if `key` is the key of a page or a manifest, else None."""
        space_id, _, name = key.removeprefix(self.prefix).partition("/")
        is_ours = name == _MANIFEST or PAGE_HASH.fullmatch(name)
        return space_id if is_ours and SPACE_ID.fullmatch(space_id) else None

    def space_id(self, key: str) -> str | None:
        """Return the key-space id if `key` is a manifest's key, else None."""
        space_id, _, name = key.removeprefix(self.prefix).partition("/")
        return space_id if name == _MANIFEST and SPACE_ID.fullmatch(space_id) else None

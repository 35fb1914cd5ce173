"""Explains in one sentence where wrong bytes come from.

The bytes are cut into spans. One source explains each span: the right bytes, a page that the cells
name, zeros, or memory that the store has not written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hicache_conformance.tools.content.cells import CELL_NBYTES, Identity, Origin, origins, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.tools.content.cells import Flags, Octets

UNTOUCHED = 0xA5
"""The byte that fills a page before a read."""

_MAX_ORIGINS = 8
_MAX_SPANS = 4
_RUN_NBYTES = 4
"""A run of this many bytes is not chance."""
_SCATTERED_NBYTES = 64
"""At most this many unexplained bytes are reported as single differences."""
_GUESSED_VERSIONS = 16
_RIGHT = "the right bytes"


@dataclass(frozen=True, slots=True)
class ExpectedPage:
    """The page of a call, with everything that helps the diagnosis."""

    own: Identity
    """The identity of the page. Its version means nothing."""
    right: list[Octets]
    """The contents that the page may have."""
    names: dict[int, tuple[str, str]]
    """The space id and the page hash, by tag."""
    known: tuple[Identity, ...]
    """The pages that were set, in all versions."""

    def label(self, identity: Identity) -> str:
        """Return the name of the page, or of the version, that some bytes belong to."""
        version = f"version {identity.version}"
        if identity.tag == self.own.tag:
            versions = {one.version for one in self.known if one.tag == identity.tag}
            never = bool(versions) and identity.version not in versions
            return f"{version} (never set)" if never else version
        unnamed = (f"{identity.space:08x}...", f"{identity.page:08x}...")
        space_id, page_hash = self.names.get(identity.tag, unnamed)
        suffix = f", {version}" if identity.version else ""
        return f"bytes of the page {page_hash} of space {space_id}{suffix}"


def describe(data: Octets, page: ExpectedPage) -> str:
    """Return a text that says what `data` is, and where its wrong bytes come from."""
    if any(np.array_equal(data, each) for each in page.right):
        return "the right page"
    return _length_text(data, page.right) + _content_text(data, page)


def _content_text(data: Octets, page: ExpectedPage) -> str:
    if not data.size:
        return "no bytes at all"
    if data.min() == data.max() and (data.size >= _RUN_NBYTES or data[0] in (0, UNTOUCHED)):
        return _filled_with(int(data[0]))
    differences = _differences(data, page.right)
    if differences is not None and differences.size < _RUN_NBYTES:
        return _guessed(data, page) or _difference_text(data, differences)
    spans = _spans(data, _sources(data, page))
    if any(span.source is None for span in spans):
        guess = _guessed(data, page)
        if guess:
            return guess
        most = min(_SCATTERED_NBYTES, data.size // CELL_NBYTES)
        if differences is not None and differences.size <= most:
            return _difference_text(data, differences)
    return _spans_text(data, spans, page)


def _length_text(data: Octets, right: list[Octets]) -> str:
    sizes = sorted({each.size for each in right})
    if not sizes or data.size in sizes:
        return ""
    return f"{data.size} bytes instead of {' or '.join(map(str, sizes))}: "


def _filled_with(value: int) -> str:
    if value == UNTOUCHED:
        return "untouched buffer"
    return f"every byte is 0x{value:02x}" if value else "all zeros"


# --- differences ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Differences:
    """The differences from the most similar right content of the same length."""

    size: int
    first: int
    expected: int


def _differences(data: Octets, right: list[Octets]) -> _Differences | None:
    places = [np.flatnonzero(each != data) for each in right if each.size == data.size]
    same_size = [each for each in right if each.size == data.size]
    if not same_size:
        return None
    nearest = min(range(len(same_size)), key=lambda number: places[number].size)
    first = int(places[nearest][0])
    return _Differences(places[nearest].size, first, int(same_size[nearest][first]))


def _difference_text(data: Octets, differences: _Differences) -> str:
    first, expected = differences.first, differences.expected
    got = int(data[first])
    words = f"first differs at byte {first}: 0x{got:02x} instead of 0x{expected:02x}"
    if differences.size > 1:
        return f"{words}; {differences.size} bytes differ in all"
    return f"{words} (one bit)" if (got ^ expected).bit_count() == 1 else words


def _guessed(data: Octets, page: ExpectedPage) -> str:
    """Find the page of bytes too short for a whole cell by trial, and return its name or ""."""
    if not _RUN_NBYTES <= data.size < CELL_NBYTES:
        return ""
    versions = [replace(page.own, version=version) for version in range(_GUESSED_VERSIONS)]
    for identity in (*page.known, *versions):
        if np.array_equal(stream(identity, 0, data.size), data):
            return page.label(identity)
    return ""


# --- sources -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """A possible source of the bytes: `read(start, nbytes)` returns its bytes from its own `start` on.

    Position p of the received bytes would hold byte p + `shift` of the source.
    """

    label: str
    read: Callable[[int, int], Octets]
    shift: int = 0

    def run(self, data: Octets, start: int) -> int:
        """Return how many bytes from `start` on this source explains."""
        at, step = start, 1 << 12
        while at < data.size:
            same = self._same(data, at, step)
            if not same.all():
                return at + int(same.argmin()) - start
            at, step = at + same.size, min(4 * step, 1 << 20)
        return data.size - start

    def next_run(self, data: Octets, start: int) -> int:
        """Return the next position from `start` on at which this source explains a run, or the end."""
        step = 1 << 16
        for at in range(start, data.size, step):
            same = self._same(data, at, step + 2 * _RUN_NBYTES)
            for width in (1, 2, 4):
                same = same[:-width] & same[width:]
            if same.any():
                return at + int(same.argmax())
        return data.size

    def text(self, start: int) -> str:
        """Describe this source, as found from byte `start` on."""
        if not self.shift:
            return self.label
        moved = f"(byte {start} holds what belongs at byte {start + self.shift})"
        return f"{self.label} shifted by {abs(self.shift)} bytes {moved}"

    def _same(self, data: Octets, start: int, nbytes: int) -> Flags:
        piece = data[start : start + nbytes]
        # The first `lead` bytes would lie before the start of the source.
        lead = min(max(0, -(start + self.shift)), piece.size)
        source_bytes = self.read(start + self.shift + lead, piece.size - lead)
        same = np.zeros(piece.size, dtype=np.bool_)
        end = lead + source_bytes.size
        np.equal(piece[lead:end], source_bytes, out=same[lead:end])
        return same


def _sources(data: Octets, page: ExpectedPage) -> list[_Source]:
    """Return the sources that may explain the bytes, the most likely first."""
    found = origins(data, _MAX_ORIGINS)
    named = [_named(each) for each in page.right]
    allowed = {identity for identity in named if identity is not None}
    seen = {one.identity for one in found if one.identity.tag == page.own.tag}
    several = len(allowed | seen) > 1

    def label(identity: Identity | None) -> str:
        plain = identity is None or (identity in allowed and not several)
        return _RIGHT if plain or identity is None else page.label(identity)

    right = [
        _right_source(label(identity), each)
        for identity, each in zip(named, page.right, strict=True)
    ]
    rest = [_origin_source(label(origin.identity), origin) for origin in found]
    return [*right, *rest, _filler(0), _filler(UNTOUCHED)]


def _named(right: Octets) -> Identity | None:
    """Return the identity that a right content names, or None if it is not made of cells."""
    found = origins(right[:CELL_NBYTES], 1)
    return found[0].identity if found else None


def _right_source(label: str, right: Octets) -> _Source:
    return _Source(label, lambda start, nbytes: right[start : start + nbytes])


def _origin_source(label: str, origin: Origin) -> _Source:
    return _Source(
        label, lambda start, nbytes: stream(origin.identity, start, nbytes), origin.shift
    )


def _filler(value: int) -> _Source:
    return _Source(_filled_with(value), lambda _, nbytes: np.full(nbytes, value, dtype=np.uint8))


# --- spans ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Span:
    """A part of the received bytes and its source, which is None if the bytes are unknown."""

    start: int
    end: int
    source: _Source | None

    def text(self, data: Octets) -> str:
        if self.source is not None:
            return self.source.text(self.start)
        shown = data[self.start : min(self.end, self.start + 8)].tobytes().hex(" ")
        more = " ..." if self.end - self.start > 8 else ""
        return f"bytes of no known page ({shown}{more})"


def _spans(data: Octets, sources: Sequence[_Source]) -> list[_Span]:
    """Cut the bytes into the first few spans, each as long as one source explains."""
    spans: list[_Span] = []
    start = 0
    while start < data.size and len(spans) <= _MAX_SPANS:
        runs = [source.run(data, start) for source in sources]
        longest = max(runs)
        if longest >= min(_RUN_NBYTES, data.size - start):
            spans.append(_Span(start, start + longest, sources[runs.index(longest)]))
        else:
            end = min(source.next_run(data, start + 1) for source in sources)
            spans.append(_Span(start, end, None))
        start = spans[-1].end
    return spans


def _spans_text(data: Octets, spans: list[_Span], page: ExpectedPage) -> str:
    right = spans[0].source is not None and spans[0].text(data) == _RIGHT
    if right and len(spans) == 1:
        whole = all(data.size >= each.size for each in page.right)
        return _RIGHT if whole else f"{_RIGHT}, cut short"
    if right and len(spans) == 2:
        return f"{spans[1].text(data)} from byte {spans[1].start} on"
    parts = [f"{span.text(data)} up to byte {span.end}" for span in spans[:_MAX_SPANS]]
    if len(spans) > _MAX_SPANS:
        return ", then ".join(parts) + ", and so on"
    parts[-1] = spans[-1].text(data)
    return ", then ".join(parts)

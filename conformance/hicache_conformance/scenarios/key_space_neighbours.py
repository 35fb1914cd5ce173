"""Key spaces that a store might confuse: one field apart, equal when joined, or oddly named."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from hicache_storage.keys import KeySpace, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    Fields = dict[str, Any]

_TEXTS = ("model", "dtype", "layout", "pool", "revision", "tenant")
_SUFFIXES = ("a-b-c", "a/b/c", "a_b/c", "a b/c", "a", "a/", "a//b", "a/b", "a/./b", "A/B", "a--b")
_QUOTED = (
    *("[a]", "{a}", "'a", '"a', "$a", "`a", "%s", "{0}", ";a", "|a"),
    *(".", "/", "/..", "\\.."),
)
_LETTERS = (
    *("stra\u00dfe", "strasse", "STRASSE", "通义千问", "通義千問", "модель"),
    "千" * 299 + "问",
)


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A key space that differs from another in one field."""

    field: str
    """The name of the field, such as `dtype` or `shard.heads`."""
    space: KeySpace
    difference: str
    """A description that shows both values."""


def rich_space(space: KeySpace) -> KeySpace:
    """Return `space` with a value in every text field, so that its neighbours can differ in each."""
    return replace(space, revision="main", tenant="team-a")


def neighbours(space: KeySpace, *, quick: bool = False) -> list[Neighbour]:
    """Return key spaces that differ from a `rich_space` in one field, each field in several values.

    With `quick`, each field has its first value only. No page is larger than those of `space`.
    """
    plain: dict[str, tuple[Any, ...]] = {
        "model": (f"{space.model}-Instruct", space.model[:-1], space.model.upper()),
        "dtype": ("float16", "float8_e4m3fn", "BFLOAT16"),
        "layout": ("layer_first", "page_first_direct"),
        "pool": ("draft", "kv2", "indexer"),
        "revision": ("main2", "", "Main"),
        "tenant": ("team-b", "", "team-a "),
        "page_tokens": (32, 1, 17),
        "page_nbytes": (max(1, space.page_nbytes // 2), max(1, space.page_nbytes - 1)),
        "frame_nbytes": (space.frame_nbytes // 2, 0),
    }
    shards: dict[str, tuple[Any, ...]] = {
        "layers": ((0, 16), (16, 32), (0, 31), (1, 32), (0, 33)),
        "heads": ((0, 4), (4, 8), None, (0, 1), (1, 8)),
        "context": ((0, 2), (1, 2), (0, 1), (0, 4)),
    }
    ways = 1 if quick else None
    found = [
        Neighbour(
            name, replace(space, **{name: value}), _difference(name, getattr(space, name), value)
        )
        for name, values in plain.items()
        for value in values[:ways]
    ]
    for name, values in shards.items():
        for value in values[:ways]:
            description = _difference(f"shard.{name}", getattr(space.shard, name), value)
            apart = replace(space, shard=replace(space.shard, **{name: value}))
            found.append(Neighbour(f"shard.{name}", apart, description))
    return [one for one in found if one.space != space]


def colliding_fields(space: KeySpace) -> Iterator[tuple[str, KeySpace, KeySpace]]:
    """Yield pairs of key spaces whose fields are equal once swapped, joined or added.

    Each pair has a description.
    """
    whole = space.stored_nbytes
    part = whole // 4
    plain: tuple[tuple[str, Fields, Fields], ...] = (
        ("revision and tenant, swapped", _texts("a", "b"), _texts("b", "a")),
        ("revision and tenant, one empty", _texts("a", ""), _texts("", "a")),
        ("no tenant, and 'default'", _texts("main", ""), _texts("main", "default")),
        ("no revision, and 'main'", _texts("", "a"), _texts("main", "a")),
        ("no revision, and 'None'", _texts("", "a"), _texts("None", "a")),
        ("tokens and size, joined", _tokens(1, 16), _tokens(11, 6)),
        ("page and frame, summed up", _sizes(whole, 0), _sizes(whole - part, part)),
        ("page and frame, swapped", _sizes(whole - part, part), _sizes(part, whole - part)),
    )
    shards: tuple[tuple[str, Fields, Fields], ...] = (
        ("layers and heads, swapped", _shard((0, 8), (8, 16)), _shard((8, 16), (0, 8))),
        ("layers and heads, joined", _shard((1, 12), (13, 14)), _shard((1, 121), (3, 14))),
        ("heads and context, swapped", _shard((0, 4), (0, 2)), _shard((0, 4), None, (0, 2))),
        ("heads, counted", _shard((0, 8), (0, 2)), _shard((0, 8), (2, 4))),
        ("layers, counted", _shard((0, 4), (0, 8)), _shard((4, 8), (0, 8))),
        ("layers, where they begin", _shard((0, 8), (0, 8)), _shard((0, 4), (0, 8))),
        ("layers, where they end", _shard((4, 8), (0, 8)), _shard((0, 8), (0, 8))),
        ("heads, where they begin", _shard((0, 8), (0, 8)), _shard((0, 8), (0, 4))),
        ("heads, where they end", _shard((0, 8), (4, 8)), _shard((0, 8), (0, 8))),
        ("context, without its size", _shard((0, 8), None, (1, 2)), _shard((0, 8), None, (1, 4))),
        ("context, without its rank", _shard((0, 8), None, (0, 2)), _shard((0, 8), None, (1, 2))),
        ("no heads, and one", _shard((0, 4), None), _shard((0, 4), (0, 1))),
        ("no context, and one rank", _shard((0, 4), (0, 8)), _shard((0, 4), (0, 8), (0, 1))),
        ("no heads, and all of them", _shard((0, 4), None), _shard((0, 4), (0, 8))),
    )
    for description, one, other in plain:
        sizes = {fields.get("page_nbytes", 1) for fields in (one, other)}
        # Pages that are too small for a pair are left out.
        if one != other and all(0 < nbytes <= whole for nbytes in sizes):
            yield description, replace(space, **one), replace(space, **other)
    for description, one, other in shards:
        first, second = replace(space.shard, **one), replace(space.shard, **other)
        yield description, replace(space, shard=first), replace(space, shard=second)


def equal_when_joined(space: KeySpace, separator: str, token: str) -> dict[str, KeySpace]:
    """Return key spaces that are equal once `separator` joins the text fields, in any order.

    In each key space, one text field is two tokens with the separator between them, and the other
    text fields are `token`. The result has each key space under the name of that one field.
    """
    texts: Fields = dict.fromkeys(_TEXTS, token)
    twice: Fields = dict.fromkeys(_TEXTS, f"{token}{separator}{token}")
    return {name: replace(space, **(texts | {name: text})) for name, text in twice.items()}


def odd_texts(space: KeySpace, *, quick: bool = False) -> Iterator[tuple[str, KeySpace]]:
    """Yield key spaces with odd values of a text field other than the model, each with a description."""
    values = ["a/b", "a-b", "A-b", "..", "a b", "a_b", "x" * 300, "x" * 299 + "y"]
    values += [unicodedata.normalize(form, "é") for form in ("NFC", "NFD")]
    for name in _TEXTS[1:]:
        for value in values[:3] if quick else values:
            field: Fields = {name: value}
            yield f"{name} {value[:9]!r}", replace(space, **field)


def similar_ids(space: KeySpace, digits: int) -> Iterator[tuple[str, KeySpace, KeySpace]]:
    """Yield a pair whose ids begin with the same few digits, and a pair whose ids end with the same.

    Each pair has a description. None of the key spaces is `space` itself, or equal to it.
    """
    ways = {"begin": slice(digits), "end": slice(-digits, None)}
    seen: dict[str, dict[str, KeySpace]] = {description: {} for description in ways}
    for number in count(space.page_tokens + 1):
        one = replace(space, page_tokens=number)
        for description, cut in list(ways.items()):
            other = seen[description].setdefault(one.id[cut], one)
            if other is not one:
                del ways[description]
                yield f"their ids {description} with {one.id[cut]}", other, one
        if not ways:
            return


def known_similar_ids() -> Iterator[tuple[str, KeySpace, KeySpace]]:
    """Yield pairs as in `similar_ids`, with twelve equal digits. The pairs are equal in every run."""
    space = KeySpace(
        model="conformance/look-alike",
        dtype="bfloat16",
        layout="page_first",
        page_tokens=1,
        page_nbytes=16,
        shard=Shard(layers=(0, 1)),
    )
    for description, one, other in (("begin", 13198055, 20640447), ("end", 15106214, 19022614)):
        first, second = replace(space, page_tokens=one), replace(space, page_tokens=other)
        yield f"their ids {description} with the same twelve digits", first, second


def odd_names(token: str, elsewhere: str, *, quick: bool = False) -> list[str]:
    """Return model names that stores mishandle or confuse. Most of them begin with `token`.

    Some are paths, for stores that use names as paths. They go up by two directories at most, or to
    `elsewhere`, which is absolute. With `quick`, there are one or two of each kind.
    """
    long = f"{token}/" + "x" * 300
    accent = f"{token}/modèle-é"
    few = [
        *(
            f"{token}{end}"
            for end in ("", " ", "/a/b-c", "/a-b/c", "-a/b", "-a%2Fb", "-a b", "-a+b")
        ),
        *(
            f"{token}/{end}"
            for end in ("b", "B", "a/../b", "\ufb01sh", "fish", "😀", "🚀", "千" * 300)
        ),
        *("..", f"../{token}", f"{elsewhere}/{token}", f"{elsewhere}/{token}".lstrip("/")),
        *(unicodedata.normalize("NFC", accent), unicodedata.normalize("NFD", accent)),
        *(long, f"{long}y", f"{token}y{long[len(token) + 1 :]}"),
    ]
    if quick:
        return few
    return [
        *few,
        *(f"{token}/{end}" for end in (*_SUFFIXES, *_LETTERS)),
        *(f"{token}-{end}" for end in ("a%20b", "a.b", "a:b", "a__b")),
        *(f"{token}{end}" for end in (*_QUOTED, "-", "~", "%", "?", "#", "*")),
        *(f"{start}{token}" for start in (" ", "../../", "./", "~/")),
        *(".", "../..", token.upper(), f"{long[:-1]}y", f"{long[:255]}y"),
    ]


def _difference(name: str, one: object, other: object) -> str:
    return f"{name} only: {other!r}, not {one!r}"


def _texts(revision: str, tenant: str) -> Fields:
    return {"revision": revision, "tenant": tenant}


def _sizes(page_nbytes: int, frame_nbytes: int) -> Fields:
    return {"page_nbytes": page_nbytes, "frame_nbytes": frame_nbytes}


def _tokens(page_tokens: int, page_nbytes: int) -> Fields:
    return {"page_tokens": page_tokens, "page_nbytes": page_nbytes, "frame_nbytes": 0}


def _shard(
    layers: tuple[int, int],
    heads: tuple[int, int] | None,
    context: tuple[int, int] | None = None,
) -> Fields:
    return {"layers": layers, "heads": heads, "context": context}

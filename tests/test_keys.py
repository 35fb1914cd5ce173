from __future__ import annotations

import array
import enum
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import hash_of, space

from hicache_storage.keys import KeySpace, Shard, check_page_hashes, namespace_seed, page_hashes

VECTORS = json.loads((Path(__file__).parent / "vectors" / "page_keys.json").read_text("utf-8"))
WIDE = 1 << 32
MAX_TOKEN = 2**63 - 1


def naive_hashes(
    tokens: Sequence[int], page_tokens: int, prior: str | None = None, *, bigram: bool = False
) -> list[str]:
    """Return the hashes by the formula, token by token."""
    units = list(itertools.pairwise(tokens)) if bigram else [(token,) for token in tokens]
    hashes: list[str] = []
    for start in range(0, len(units), page_tokens):
        words = [word for unit in units[start : start + page_tokens] for word in unit]
        wide = max(words) > 0xFFFFFFFF
        body = bytes.fromhex(prior or "") + (b"\xff" if wide else b"")
        body += b"".join(word.to_bytes(8 if wide else 4, "little") for word in words)
        prior = hashlib.sha256(body).hexdigest()
        hashes.append(prior)
    return hashes


narrow = st.integers(0, WIDE - 1)
wide = st.integers(WIDE, MAX_TOKEN)
boundary = st.sampled_from([0, 1, 2**31 - 1, 2**31, WIDE - 1, WIDE, WIDE + 1, MAX_TOKEN])
token_lists = st.lists(narrow, max_size=40) | st.lists(narrow | wide | boundary, max_size=40)
priors = st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex)


# --- page hashes ---------------------------------------------------------------------------------


def as_uint32(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.uint64 if max(tokens) >= WIDE else np.uint32)


def as_int32(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=np.int64 if max(tokens) >= 1 << 31 else np.int32)


def as_every_second(tokens: list[int]) -> Any:
    return np.repeat(np.array(tokens, dtype=np.int64), 2)[::2]


def as_column(tokens: list[int]) -> Any:
    return np.stack([np.array(tokens, dtype=np.int64)] * 3, axis=1)[:, 1]


def as_big_endian(tokens: list[int]) -> Any:
    return np.array(tokens, dtype=">i8")


def as_array(tokens: list[int]) -> Any:
    return array.array("q", tokens)


def as_numpy_items(tokens: list[int]) -> Any:
    return [np.int64(token) for token in tokens]


FORMS: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    as_int32,
    as_uint32,
    as_every_second,
    as_column,
    as_big_endian,
    as_array,
    as_numpy_items,
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda vector: vector["id"])
def test_hashes_are_sglangs_in_every_form_of_tokens(
    vector: dict[str, Any], form: Callable[[list[int]], Any]
) -> None:
    seed = namespace_seed(vector.get("extra_key"), vector.get("cache_salt"))
    bigram = vector.get("bigram", False)

    assert vector["hashes"] == page_hashes(
        form(vector["tokens"]), vector["page_tokens"], seed, bigram=bigram
    )


@pytest.mark.parametrize("seed", VECTORS["seeds"], ids=str)
def test_seeds_are_sglangs(seed: dict[str, str | None]) -> None:
    assert seed["seed"] == namespace_seed(seed["extra_key"], seed["cache_salt"])


@settings(deadline=None)  # the machine may be busy
@given(tokens=token_lists, page_tokens=st.integers(1, 12), prior=priors, bigram=st.booleans())
def test_hashes_follow_the_formula(
    tokens: list[int], page_tokens: int, prior: str | None, *, bigram: bool
) -> None:
    expected = naive_hashes(tokens, page_tokens, prior, bigram=bigram)

    assert expected == page_hashes(tokens, page_tokens, prior, bigram=bigram)
    if tokens:
        in_array = np.array(tokens, dtype=np.uint64)
        assert expected == page_hashes(in_array, page_tokens, prior, bigram=bigram)


def test_tokens_are_not_changed() -> None:
    tokens = np.arange(64, dtype=np.int32)
    page_hashes(tokens, 16)

    assert list(range(64)) == tokens.tolist()


@pytest.mark.parametrize(
    "tokens",
    [
        range(64),
        np.frombuffer(bytes(range(64)), np.uint8),  # read-only
        *(np.arange(64, dtype=dtype) for dtype in (np.int8, np.int16, np.uint16)),
    ],
)
def test_small_and_read_only_integers_are_hashed_as_words(tokens: Any) -> None:
    assert naive_hashes(range(64), 16) == page_hashes(tokens, 16)


@pytest.mark.parametrize("bigram", [False, True])
@pytest.mark.parametrize("tokens", [[], (), np.array([], dtype=np.int32), range(0)])
def test_no_tokens_make_no_hashes(tokens: Any, *, bigram: bool) -> None:
    assert [] == page_hashes(tokens, 4, bigram=bigram)


def test_an_empty_prior_is_no_prior() -> None:
    assert page_hashes([1, 2], 1) == page_hashes([1, 2], 1, "")


@pytest.mark.parametrize(
    "tokens",
    [
        [1, -1],
        (1, 2**63),
        [1, 2**64],
        [WIDE, -1],
        np.array([1, -1], dtype=np.int32),
        np.array([1, -1], dtype=np.int64),
        np.array([1, -1], dtype=np.int8),
        np.array([1, 2**63], dtype=np.uint64),
        np.array([1.0, 2.0]),
        [1, 2.0],
        [1, "2"],
        [1, None],
        np.array([True, False]),
        np.array([[1, 2], [3, 4]]),
        5,
    ],
    ids=repr,
)
def test_tokens_that_are_none_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens must be"):
        page_hashes(tokens, 1)


@pytest.mark.parametrize("value", [True, 16.0, "16", 0, -1, 10**400])
def test_pages_are_of_a_whole_number_of_tokens(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"^page_tokens must be"):
        page_hashes([1, 2, 3], value)


@pytest.mark.parametrize(
    "prior",
    ["ab", "g" * 64, "a" * 63, "a" * 66, "ab " * 32, "\n" + "ab" * 32, " ", "ab" * 31, "ab" * 33],
)
def test_a_prior_is_all_of_a_digest(prior: str) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"prior must be a SHA-256 in hex, not {prior!r}")
    ):
        page_hashes([1, 2, 3], 2, prior)


@pytest.mark.parametrize("page_hash", ["ab" * 16, "0" * 64, "f" * 128, hash_of(1)])
def test_a_page_hash_is_16_to_64_bytes_of_hex(page_hash: str) -> None:
    check_page_hashes([page_hash])


@pytest.mark.parametrize(
    "page_hash",
    [
        "",
        "ab" * 15,
        "ab" * 65,
        "a" * 33,
        "AB" * 16,
        "ab" * 16 + "\n",
        "../" + "a" * 61,
        "é" * 32,
        "٣" * 32,
        "0x" + "a" * 30,
        "a b" * 12,
        "\0" * 32,
    ],
)
def test_a_hostile_page_hash_is_refused(page_hash: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(page_hash))):
        check_page_hashes([hash_of(0), page_hash])


# --- key spaces ----------------------------------------------------------------------------------

BASE = space(shard=Shard(layers=(0, 32), heads=(0, 8), context=(0, 2)))
OTHERS = {
    "model": replace(BASE, model="another"),
    "dtype": replace(BASE, dtype="float16"),
    "layout": replace(BASE, layout="layer_first"),
    "page_tokens": replace(BASE, page_tokens=32),
    "page_nbytes": replace(BASE, page_nbytes=4095),
    "pool": replace(BASE, pool="draft"),
    "revision": replace(BASE, revision="r2"),
    "tenant": replace(BASE, tenant="t2"),
    "frame_nbytes": replace(BASE, frame_nbytes=128),
    "shard.layers": replace(BASE, shard=Shard(layers=(0, 31), heads=(0, 8), context=(0, 2))),
    "shard.heads": replace(BASE, shard=Shard(layers=(0, 32), heads=(1, 8), context=(0, 2))),
    "shard.context": replace(BASE, shard=Shard(layers=(0, 32), heads=(0, 8), context=(1, 2))),
}
MODELS = [
    "a/b-c",
    "a-b/c",
    "a-b-c",
    "a/b/c",
    "../../etc/passwd",
    "..",
    ".",
    "a b",
    " a b",
    "a\tb",
    "a\0b",
    "модель/日本",
    "é",
    "e\N{COMBINING ACUTE ACCENT}",
    "m" * 300,
    "m" * 299,
    "A/B-C",
]


def test_every_field_is_in_the_list_above() -> None:
    names = {field.name for field in fields(KeySpace)} - {"shard"}

    assert names | {f"shard.{field.name}" for field in fields(Shard)} == set(OTHERS)


@pytest.mark.parametrize("field", OTHERS)
def test_a_difference_in_one_field_is_another_id(field: str) -> None:
    assert OTHERS[field] != BASE
    assert OTHERS[field].id != BASE.id


def test_absent_heads_and_context_are_ids_of_their_own() -> None:
    shards = [
        Shard(layers=(0, 1)),
        Shard(layers=(0, 1), heads=(0, 1)),
        Shard(layers=(0, 1), context=(0, 1)),
        Shard(layers=(0, 1), heads=(0, 1), context=(0, 1)),
    ]

    assert 4 == len({space(shard=shard).id for shard in shards})


def test_text_that_moves_from_field_to_field_is_another_id() -> None:
    fills = itertools.permutations(["a", "b", "ab", "ba"])
    names = ("model", "pool", "revision", "tenant")
    ids = {space(**dict(zip(names, fill, strict=True))).id for fill in fills}

    assert 24 == len(ids)


def test_a_model_of_any_name_has_an_id_of_32_hex_digits_of_its_own() -> None:
    ids = {space(model=model).id for model in MODELS}

    assert len(MODELS) == len(ids)
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in ids)


def test_the_id_of_a_key_space_never_changes() -> None:
    """The expected ids are constants. With other ids, existing stores would not find their pages."""
    assert "249ea47604b499fa14714a1d717a3f74" == BASE.id


@pytest.mark.parametrize("key_space", [BASE, *OTHERS.values()], ids=["base", *OTHERS])
def test_a_manifest_survives_json(key_space: KeySpace) -> None:
    again = KeySpace.from_manifest(json.loads(json.dumps(key_space.manifest())))

    assert key_space == again
    assert key_space.id == again.id
    assert hash(key_space) == hash(again)


@settings(deadline=None)  # the machine may be busy
@given(
    st.builds(
        space,
        model=st.text(min_size=1) | st.sampled_from(MODELS),
        page_nbytes=st.integers(1, 1 << 40),
        tenant=st.text(),
        shard=st.builds(
            Shard, layers=st.tuples(st.integers(0, 9), st.integers(10, 99)), heads=st.none()
        ),
    )
)
def test_any_key_space_survives_its_manifest(key_space: KeySpace) -> None:
    assert key_space == KeySpace.from_manifest(json.loads(json.dumps(key_space.manifest())))


def test_stored_bytes_are_frame_and_payload() -> None:
    assert 4096 + 128 == space(page_nbytes=4096, frame_nbytes=128).stored_nbytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", ""),
        ("dtype", ""),
        ("layout", ""),
        ("pool", ""),
        ("page_tokens", 0),
        ("page_nbytes", 0),
        ("page_nbytes", -1),
        ("frame_nbytes", -1),
        ("model", "\ud800"),
        ("tenant", "\ud800"),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field):
        space(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("tenant", None),
        ("dtype", np.float16),
        ("shard", {"layers": (0, 32)}),
        ("shard", None),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TypeError, match=field):
        space(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", (0, 0)),
        ("layers", (2, 1)),
        ("layers", (-1, 1)),
        ("heads", (0, 0)),
        ("heads", (8, 0)),
        ("context", (2, 2)),
        ("context", (-1, 2)),
        ("context", (0, 0)),
    ],
)
def test_an_empty_or_reversed_range_is_refused_by_name(field: str, value: Any) -> None:
    parts: dict[str, Any] = {"layers": (0, 1), field: value}
    with pytest.raises(ValueError, match=field):
        Shard(**parts)


@pytest.mark.parametrize("value", [3, (0, 1, 2), "01", None, (0, 1.5), (0, True)])
def test_a_range_that_is_no_pair_of_integers_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="layers"):
        Shard(layers=value)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None},
        {"page_tokens": 0},
        {"page_tokens": "16"},
        {"shard": None},
        {"shard": {}},
        {"shard": {"layers": [0]}},
        {"shard": {"layers": [0, 1], "ranks": [0, 1]}},
        {"colour": "red"},
    ],
)
def test_a_manifest_that_describes_no_key_space_is_a_value_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|not the manifest"):
        KeySpace.from_manifest(space().manifest() | change)


@pytest.mark.parametrize("missing", space().manifest())
def test_a_manifest_without_a_required_field_is_a_value_error(missing: str) -> None:
    manifest = space().manifest()
    del manifest[missing]
    if missing in ("pool", "revision", "tenant", "frame_nbytes"):
        assert space() == KeySpace.from_manifest(manifest)
    else:
        with pytest.raises(ValueError, match=f"not the manifest of a key space.*{missing}"):
            KeySpace.from_manifest(manifest)


@pytest.mark.parametrize("manifest", [None, [], "x", 3])
def test_json_that_is_no_object_is_no_manifest(manifest: Any) -> None:
    with pytest.raises(ValueError, match="not the manifest"):
        KeySpace.from_manifest(manifest)


class Model(enum.StrEnum):
    LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


class OldModel(str, enum.Enum):  # noqa: UP042 - such classes are older than StrEnum
    LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": np.str_("meta-llama/Llama-3.1-8B-Instruct")},
        {"model": Model.LLAMA},
        {"model": OldModel.LLAMA},
        {"page_tokens": np.int64(16), "page_nbytes": np.uint32(4096), "frame_nbytes": np.int8(0)},
        {"shard": Shard(layers=(np.int64(0), np.uint8(32)), heads=[np.int32(0), 8])},  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_a_key_space_of_other_scalars_is_the_same_key_space(changes: dict[str, Any]) -> None:
    """Fields become plain values, so the id and the manifest do not depend on the types passed in."""
    plain, made = space(), space(**changes)

    assert made == plain
    assert made.id == plain.id
    assert json.loads(json.dumps(made.manifest())) == plain.manifest()
    assert {str, int, Shard} == {type(getattr(made, field.name)) for field in fields(KeySpace)}


@pytest.mark.parametrize("name", ["page_tokens", "page_nbytes", "frame_nbytes"])
@pytest.mark.parametrize(
    "value", [True, np.bool_(1), 16.0, np.float64(16), "16", None, 2**63, 10**400]
)
def test_a_size_of_a_key_space_is_a_whole_number_of_64_bits(name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"^{name} must be (an integer|at most)"):
        space(**{name: value})


@pytest.mark.parametrize("given", [{"extra_key": "\ud800"}, {"cache_salt": "a\udfff"}])
def test_a_salt_that_utf8_cannot_hold_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"extra_key and cache_salt must be text that UTF-8 can hold"
    ):
        namespace_seed(**given)

"""Layouts and key spaces of objects, without LMCache."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from hicache_storage.errors import ConfigError
from hicache_storage.integrations.lmcache._identity import Identity, page_hash
from hicache_storage.integrations.lmcache._object_layouts import Layout, Layouts, UnknownLayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Dtype:
    """A type, as torch prints it."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


BF16, U8 = Dtype("bfloat16", 2), Dtype("uint8", 1)


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes = b"h" * 32
    model_name: str = "org/model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Desc:
    shapes: Sequence[Sequence[int]] = ((2, 3, 16, 64),)
    dtypes: Sequence[Any] = (BF16,)


@dataclass(frozen=True)
class Memory:
    desc: Desc = field(default_factory=Desc)
    nbytes: int = 2 * 3 * 16 * 64 * 2
    byte_array: Any = b""
    parts: bool = True

    @property
    def meta(self) -> Any:
        return SimpleNamespace(shapes=self.desc.shapes if self.parts else None)

    def get_shape(self) -> Sequence[int]:
        return self.desc.shapes[0]

    def get_dtype(self) -> Any:
        return self.desc.dtypes[0]

    def get_size(self) -> int:
        return self.nbytes

    def get_shapes(self) -> Sequence[Sequence[int]]:
        return self.desc.shapes

    def get_dtypes(self) -> Sequence[Any]:
        return self.desc.dtypes


class HalfSize:
    """A serde that makes half as many bytes as there are elements of two bytes."""

    def estimate_serialized_size(self, layout_desc: Any) -> int:
        (shape,) = layout_desc.shapes
        return math.prod(shape)

    def close(self) -> None: ...


IDENTITY = Identity(revision="main", tenant="", server="")


class TestLayouts:
    def test_an_object_and_a_lookup_of_it_have_one_layout(self) -> None:
        layouts = Layouts("")

        assert layouts.of_object(Key(), Memory()) == layouts.of_lookup(Key(), {0: Desc()})

    @pytest.mark.parametrize("hints", [{}, {0: Desc((), ())}, {1: Desc()}])
    def test_a_lookup_without_a_hint_has_the_layout_of_the_last_object(
        self, hints: dict[int, Desc]
    ) -> None:
        layouts = Layouts("")
        assert layouts.of_lookup(Key(), hints) is None
        layout = layouts.of_object(Key(), Memory())

        assert layout is layouts.of_lookup(replace(Key(), chunk_hash=b"x" * 32), hints)
        assert layouts.of_lookup(replace(Key(), kv_rank=0x02010201), hints) is None

    def test_an_object_without_parts_is_one_part(self) -> None:
        layouts = Layouts("")

        assert layouts.of_object(Key(), Memory(parts=False)) == layouts.of_object(Key(), Memory())

    def test_bytes_have_the_stated_type(self) -> None:
        memory = Memory(Desc(dtypes=(U8,)), 2 * 3 * 16 * 64)

        assert Layouts("float8_e5m2").of_object(Key(), memory).dtype == "float8_e5m2"
        with pytest.raises(UnknownLayoutError, match="kv_dtype"):
            Layouts("").of_object(Key(), memory)

    def test_a_size_that_does_not_fit_the_layout_is_refused(self) -> None:
        with pytest.raises(UnknownLayoutError, match="whose size varies"):
            Layouts("").of_object(Key(), Memory(nbytes=100))

    def test_a_row_of_bytes_is_refused_unless_it_is_stated(self) -> None:
        row = Memory(Desc(((64,),), (U8,)), 64)

        with pytest.raises(UnknownLayoutError, match="serde"):
            Layouts("float8_e4m3fn").of_object(Key(), row)
        assert Layouts("uint8").of_object(Key(), row).nbytes == 64

    def test_the_parts_of_a_hybrid_object_are_all_in_its_text(self) -> None:
        desc = Desc(((2, 3, 16, 64), (1, 2, 16, 8)), (BF16, Dtype("float32", 4)))
        layout = Layouts("").of_lookup(Key(), {0: desc})

        assert layout is not None
        assert "2x3x16x64:bfloat16,1x2x16x8:float32" == layout.text
        assert ("bfloat16+float32", 16, 5) == (layout.dtype, layout.tokens, layout.layers)
        assert not layout.is_latent

    def test_a_latent_layout_has_no_heads(self) -> None:
        for shape in ((3, 16, 64), (1, 3, 16, 64)):
            layout = Layouts("").of_lookup(Key(), {0: Desc((shape,))})
            assert layout is not None
            assert layout.is_latent
            assert IDENTITY.space(Key(), layout).shard.heads is None


class TestSerde:
    def test_an_object_gets_the_hinted_layout_of_its_size(self) -> None:
        layouts = Layouts("", {"type": "fp8"}, HalfSize())
        memory = Memory(Desc(((6144,),), (U8,)), 6144)
        with pytest.raises(UnknownLayoutError, match="0 of the layouts"):
            layouts.of_object(Key(), memory)
        layout = layouts.of_lookup(Key(), {0: Desc()})

        assert layout is layouts.of_object(Key(), memory)
        assert layout is not None
        assert layout.text.startswith("2x3x16x64:bfloat16;serde=fp8-")

    def test_two_layouts_of_one_size_are_not_guessed_between(self) -> None:
        layouts = Layouts("", {"type": "fp8"}, HalfSize())
        layouts.of_lookup(Key(), {0: Desc()})
        layouts.of_lookup(Key(), {0: Desc(((2, 3, 64, 16),))})

        with pytest.raises(UnknownLayoutError, match="2 of the layouts"):
            layouts.of_object(Key(), Memory(Desc(((6144,),), (U8,)), 6144))

    def test_every_field_of_a_serde_is_in_the_text(self) -> None:
        fields = ({"type": "fp8"}, {"type": "fp8", "fp8_dtype": "float8_e5m2"})
        texts = [Layouts("", serde, HalfSize()).of_lookup(Key(), {0: Desc()}) for serde in fields]

        assert texts[0] != texts[1]

    def test_a_serde_without_a_type_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="type"):
            Layouts("", {"name": "fp8"}, HalfSize())


class TestIdentity:
    def test_every_property_gives_another_key_space(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        keys = [
            Key(),
            replace(Key(), model_name="other"),
            replace(Key(), kv_rank=0x08010801),
            replace(Key(), object_group_id=1),
            replace(Key(), cache_salt="salt"),
        ]
        identities = [
            IDENTITY,
            replace(IDENTITY, revision="step-2"),
            replace(IDENTITY, tenant="t"),
            replace(IDENTITY, server="0/2"),
            replace(IDENTITY, server="1/2"),
        ]
        spaces = [each.space(key, layout).id for key in keys for each in identities]

        assert len(spaces) == len(set(spaces))

    def test_a_tenant_and_a_salt_are_not_confused(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        pairs = [("", ""), ("a", ""), ("", "a"), ("a@b", ""), ("a", "b"), ("a@", "b")]
        tenants = [
            replace(IDENTITY, tenant=tenant).space(replace(Key(), cache_salt=salt), layout).tenant
            for tenant, salt in pairs
        ]

        assert len(pairs) == len(set(tenants))

    def test_the_rank_is_the_shards_place(self) -> None:
        layout = Layout((((2, 3, 16, 64), "bfloat16"),), 12288)
        space = IDENTITY.space(replace(Key(), kv_rank=0x08030803), layout)

        assert ((0, 3), (3, 4)) == (space.shard.layers, space.shard.heads)
        assert "rank=0x08030803" in space.layout

    @pytest.mark.parametrize("nbytes", [4, 8, 15, 65])
    def test_a_hash_of_another_length_is_no_page_hash(self, nbytes: int) -> None:
        with pytest.raises(UnknownLayoutError, match="--hash-algorithm"):
            page_hash(replace(Key(), chunk_hash=b"x" * nbytes))

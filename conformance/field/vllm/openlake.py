"""OpenLake's `Client` of its daemon `openlaked`, called as its vLLM connector calls it.

The connector passes on these fields of a key space: the model (12 bytes of its hash), the pool (as the
number of a KV cache group), the shard (as ranks) and in the block hash the tenant and the tokens of a
page. It does not pass on dtype, layout, revision, or how many ranks there are.

A daemon has slots of one size. The connector asks for a slot as large as the largest page of any
rank, so smaller pages lie in larger slots.
"""

from __future__ import annotations

import hashlib
import importlib
import secrets
import struct
from typing import TYPE_CHECKING, Any, ClassVar, Self

from field.adapter import equal_part
from field.vllm.connectors import POOLS, Buffers, ConnectorStorage, ModelSettings
from hicache_storage.errors import StorageUnavailable, UnsupportedOperation
from hicache_storage.settings import ByteSize, Field
from hicache_storage.storage import Capabilities, Durability, Retention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.keys import KeySpace

HEADER_NBYTES = 54
"""`SLOT_HEADER_BYTES` of the connector: the key of a page at the start of its slot."""
_FIRST_CLIENT, _LAST_CLIENT = 2048, 0xFFF


class OpenLakeSettings(ModelSettings):
    """Settings of the engine and the connector."""

    nodes: list[str] = Field(min_length=1)
    """`openlake_nodes`: the addresses of the daemons."""
    cache_prefix: str = ""
    largest_page_nbytes: ByteSize = Field(default=1 << 20, gt=0)
    """The size of the largest page of any rank."""


class OpenLake(ConnectorStorage):
    """`openlake_client.Client`, over HTTP/2 and shared memory."""

    distribution = "openlake-vllm"
    absent: ClassVar[Mapping[str, str]] = {
        **ConnectorStorage.absent,
        "open_space": "its engine cuts layers and heads into equal parts, and a slot has one size",
    }
    capabilities = Capabilities(
        retention=Retention.UNTIL_PRESSURE,
        durability=Durability.CRASH,
        shared=True,
        overwrites=False,
        scatter_gather=False,
    )

    def __init__(self, settings: OpenLakeSettings) -> None:
        super().__init__()
        self._settings = settings

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return cls(OpenLakeSettings.parse("openlake", config))

    def make_client(self) -> Any:
        number = _FIRST_CLIENT + secrets.randbelow(_LAST_CLIENT - _FIRST_CLIENT)
        client = importlib.import_module("openlake_client").Client(device="local", client_id=number)
        slot_nbytes = HEADER_NBYTES + self._settings.largest_page_nbytes
        try:
            for node, address in enumerate(self._settings.nodes):
                client.attach(address, node, slot_nbytes)
        except (OSError, RuntimeError) as error:  # vLLM's worker would not start either
            raise StorageUnavailable(f"OpenLake's daemon can't be attached: {error}") from error
        return client

    def key_of(self, space: KeySpace, page_hash: str) -> bytes:
        """Return the key of a page, as `GroupKeys.key_for` of the connector makes it."""
        settings = self._settings
        if space.pool not in POOLS or space.stored_nbytes > settings.largest_page_nbytes:
            raise UnsupportedOperation(
                f"pool {space.pool!r}, {space.stored_nbytes} bytes: an engine has the pools"
                f" {', '.join(POOLS)}, and a slot has {settings.largest_page_nbytes} bytes"
            )
        shard = space.shard
        heads = equal_part(shard.heads, settings.total_heads, "heads")[0] if shard.heads else 0
        stage = equal_part(shard.layers, settings.total_layers, "layers")[0]
        context = shard.context[0] if shard.context else 0
        tag = f"{settings.cache_prefix}\0{space.model}" if settings.cache_prefix else space.model
        digest = hashlib.sha256(f"{space.tenant}|{space.page_tokens}|{page_hash}".encode()).digest()
        return (
            digest
            + hashlib.blake2b(tag.encode(), digest_size=12).digest()
            + struct.pack("<HHHHH", POOLS.index(space.pool), heads, 0, context, stage)
        )

    def ask(self, client: Any, keys: list[Any]) -> list[bool]:
        return [state == 1 for state in client.batch_is_exist(keys)]

    def move(self, client: Any, verb: str, keys: list[Any], buffers: Buffers) -> list[bool]:
        call = client.get_batch if verb == "get" else client.put_batch
        return [state >= 0 for state in call(keys, buffers.addresses, buffers.sizes)]

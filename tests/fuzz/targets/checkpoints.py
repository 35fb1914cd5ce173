"""Files of weights: any bytes have a fingerprint, the same in every place, and no index is trusted."""

from __future__ import annotations

import json
import struct

from fuzz.choices import Choices
from fuzz.scratch import directory, write

from hicache_storage.integrations._weights import _named_by, _sampled_digest

_HEADER = json.dumps(
    {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]},
        "b": {"dtype": "F16", "shape": [2, 2], "data_offsets": [8, 16]},
    }
).encode()
_INDEX = json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode()
_KIND_HEADER, _KIND_INDEX, _KIND_LONGER = 0, 2, 3

SEEDS = (
    b"",
    bytes([_KIND_HEADER]) + _HEADER,
    bytes([1]) + struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(range(16)),
    bytes([_KIND_INDEX]) + _INDEX,
    bytes([_KIND_LONGER]) + struct.pack("<Q", len(_HEADER)) + _HEADER + bytes(range(16)),
    *(bytes([kind]) + b"[" * 2000 for kind in (_KIND_HEADER, _KIND_INDEX)),
)
TOKENS = (
    *(
        b'"data_offsets": ',
        b"[0, 8]",
        b"-1",
        b"1e999",
        b"NaN",
        b"1e30",
        b"9" * 30,
        b"null",
        b"{}",
        b"[]",
    ),
    *(b'"weight_map": ', b'"../x"', b'"a"', b"1e300", b"9223372036854775807"),
)


def check(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.integer(0, 3)
    content = choices.rest()
    folder = directory("checkpoints")
    if kind == _KIND_INDEX:
        path = folder / "index.json"
        write(str(path), content)
        found = _named_by(path)
        assert found == sorted(set(found))
        return
    if kind == _KIND_HEADER:
        content = struct.pack("<Q", len(content)) + content + bytes(range(16))
    is_longer = kind == _KIND_LONGER
    digests: list[bytes] = []
    for name, end in (("model.safetensors", b""), ("copy.safetensors", b"x" * is_longer)):
        path = folder / name
        write(str(path), content + end)
        digests.append(_sampled_digest(path))
    assert is_longer == (digests[0] != digests[1]), "the size is a part of the fingerprint"

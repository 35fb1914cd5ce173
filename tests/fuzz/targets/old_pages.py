"""Lists of old pages of `file`: victims lie under the root, and both data planes take the same lines."""

from __future__ import annotations

import os
import re
import struct
from functools import cache

from data_planes import compiled
from fuzz.choices import Choices
from fuzz.scratch import directory, read, write
from hicache_backends.file.layout import Layout
from hicache_backends.file.victims_file import VictimsFile
from pages import hash_of

from hicache_storage.native import HIT, WRONG, reference

_HEADER = struct.Struct("<8sQQQ")
_MAGIC = b"HiVictim"
_PAGE = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/[0-9a-f]{32,128}")
_LINES = b"".join(
    b"%d %d %b/%b/%b\n" % (10**18 + n, 4160, b"0f" * 16, page[:2], page)
    for n, page in enumerate(hash_of(n).encode() for n in range(3))
)

SEEDS = (
    b"",
    *(
        bytes([count]) + _HEADER.pack(_MAGIC, taken, 5, 6) + _LINES
        for count in (1, 200)
        for taken in (0, 32, 40, 133, 1 << 20, (1 << 64) - 1)
    ),
    b"\1" + _HEADER.pack(_MAGIC, 32, 5, 6) + b"x" * 300,
)
TOKENS = (_MAGIC, _LINES[:101], b"\n", b"../", b" ")


@cache
def _root() -> str:
    """Return the root of a store of this process that has a folder for its lists."""
    root = directory("old-pages")
    (root / "survey").mkdir()
    return str(root)


def check(data: bytes) -> None:
    choices = Choices(data)
    count = choices.integer(1, 256)
    content = choices.rest()
    root = _root()
    path = f"{root}/survey/victims"
    found: list[object] = []
    for module in (reference, compiled or reference):
        write(path, content)
        taken = module.take_lines(os.fsencode(path), _MAGIC, 2048, count, 256, 0.0)
        assert taken[0] in (HIT, WRONG)
        found.append((taken if taken[0] == HIT else WRONG, read(path)))
    assert found[0] == found[1]

    write(path, content)
    layout = Layout(root)
    file = VictimsFile(layout)
    info = file.info()
    taken_pages = file.take(count)
    assert (taken_pages.scan is None) == (not content.startswith(_MAGIC) or len(content) < 32)
    assert (info is None) == (taken_pages.scan is None)
    for victim in taken_pages.victims:
        prefix, _, page = victim.path.partition("/spaces/")
        assert (root, True) == (prefix, _PAGE.fullmatch(page) is not None)
        assert victim.nbytes >= 0
    assert info is None or (0 <= info.left <= 1 and info.taken >= _HEADER.size)
    assert taken_pages.scan is None or 0 <= taken_pages.scan.left <= 1

"""Ledgers of `file`: bytes are a ledger or another program's file, and no sum is negative."""

from __future__ import annotations

import os
import struct

from data_planes import compiled
from fuzz.choices import Choices
from fuzz.scratch import directory, read, write
from hicache_backends.file.ledger import Ledger, NotALedger, Totals

from hicache_storage.backend_support.deadline import Deadline
from hicache_storage.native import HIT, WRONG, reference

_RECORD = struct.Struct("<QQ")

SEEDS = (
    b"",
    *(
        _RECORD.pack(*totals)[cut:] + bytes([1, 2, 3, 4]) * 6
        for totals in ((0, 0), (1, 1), (5, 9), (9, 5), (1 << 62, 1), (1 << 63, 0))
        for cut in (0, 1)
    ),
)
TOKENS = (_RECORD.pack(1 << 62, 0), bytes(8))


def check(data: bytes) -> None:
    choices = Choices(data)
    content = choices.take(choices.pick((16, 0, 15, 17, 16)))
    added, removed = choices.integer(0, 1 << 40), choices.integer(0, 1 << 41)
    _check_planes_agree(content, added, removed)
    path = f"{directory('ledgers')}/usage"
    write(path, content)
    try:
        ledger = Ledger(path)
    except NotALedger:
        assert len(content) not in (0, _RECORD.size)
        assert content == read(path)
        return
    try:
        _check_ledger(ledger, content, choices)
    finally:
        ledger.close()


def _check_ledger(ledger: Ledger, content: bytes, choices: Choices) -> None:
    before = Totals(*_RECORD.unpack(content)) if content else Totals(0, 0)
    assert ledger.used == (0 if ledger.needs_scan else before.used)
    deadline = Deadline(5)
    for _ in range(choices.integer(0, 3)):
        nbytes = choices.integer(-(1 << 20), 1 << 20)
        used = ledger.used
        ledger.add(nbytes, deadline)
        assert ledger.used == max(0, used + nbytes)
        assert ledger.totals(deadline).used == ledger.used
    if ledger.needs_scan:
        found = choices.integer(0, 1 << 30)
        ledger.correct(found, 0, ledger.totals(deadline), deadline)
        assert (found, False) == (ledger.used, ledger.needs_scan)


def _check_planes_agree(content: bytes, added: int, removed: int) -> None:
    found: list[object] = []
    path = f"{directory('ledgers')}/plane"
    for module in (reference, compiled or reference):
        write(path, content)
        fd = os.open(path, os.O_RDWR)
        try:
            verdict, *totals = module.change_totals(fd, added, removed, 0.0)
        finally:
            os.close(fd)
        assert verdict in (HIT, WRONG)
        if verdict == HIT:
            assert 0 <= totals[1] <= totals[0]
        else:
            assert content == read(path)
        found.append((verdict, totals if verdict == HIT else [], read(path)))
    assert found[0] == found[1]

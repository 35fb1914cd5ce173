"""Ctrl-C during calls of the `file` backend: hundreds of interrupts, at any point of the call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_STORM = """
import os, random, signal, sys
from hicache_backends.file import FileStorage
from hicache_backends.file.page_file import TRAILER_NBYTES
from hicache_storage.backend_support.deadline import Deadline
from pages import hash_of, page, space
from servers import wait_until

INTERRUPTS, PAGES = 300, 40
sp = space(page_nbytes=1 << 16)
file_nbytes = sp.stored_nbytes + TRAILER_NBYTES
one, chance = page(1 << 16), random.Random(1)
storage = FileStorage.from_config(
    {"path": sys.argv[1], "capacity_nbytes": PAGES * file_nbytes, "durability": sys.argv[2]}
)
storage.open_space(sp)

def interrupt(*_):
    raise KeyboardInterrupt

def put(number):
    hashes = [hash_of(10 * number + place) for place in range(10)]
    stored = storage.batch_set(sp, hashes, [one] * 10)
    storage.batch_delete(sp, hashes[:2])
    return stored

def call(number):
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 6e-3))
        put(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return 1
    return 0

def on_disk():
    files = [os.path.join(at, name) for at, _, names in os.walk(sys.argv[1]) for name in names]
    return sum(os.path.getsize(one) for one in files if os.path.getsize(one) >= file_nbytes)

signal.signal(signal.SIGALRM, interrupt)
interrupts = number = 0
while interrupts < INTERRUPTS:
    try:
        number += 1
        interrupts += call(number)
    except KeyboardInterrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
process = storage._process.get()
put(10**6)
wait_until(lambda: not process.capacity.is_in_doubt, 60)
used = process.ledger.totals(Deadline(1)).used
assert used == on_disk() <= PAGES * file_nbytes, (used, on_disk())
assert 0 == process.writer.pending_nbytes()
for number in range(2 * 10**6, 2 * 10**6 + 8):
    assert all(put(number)), "all of the capacity is left"
assert process.ledger.totals(Deadline(1)).used == on_disk() > (PAGES - 11) * file_nbytes
storage.close()
print("fine", os.listdir(sys.argv[1] + "/writers"))
"""


@pytest.mark.parametrize("durability", ["crash", "power"])
def test_after_a_storm_of_interrupts_the_ledger_is_what_is_on_the_disk(
    tmp_path: Path, durability: str
) -> None:
    support = str(Path(__file__).parents[2] / "support")
    done = subprocess.run(
        [sys.executable, "-c", _STORM, str(tmp_path / "root"), durability],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([support, *sys.path])},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "fine []\n") == (done.returncode, done.stdout), done.stderr

"""The ledger of the `file` backend."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hicache_backends.file import FileStorage
from hicache_backends.file.ledger import Ledger

from hicache_storage.backend_support.deadline import Deadline

LIMIT_S = 60.0
_FIRST_WRITE = """
import resource, signal, sys
from hicache_backends.file.ledger import Ledger, Totals
from hicache_storage.backend_support.deadline import Deadline

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
Ledger(sys.argv[1]).correct(100, 0, Totals(0, 0), Deadline(5))
"""


class TestLedgerOfAKilledProcess:
    """A process may be killed between any two steps of its first write."""

    @pytest.mark.parametrize("nbytes", [0, 16])
    def test_zeros_are_counted_again(self, tmp_path: Path, nbytes: int) -> None:
        opened = FileStorage.from_config({"path": str(tmp_path)})
        opened.close()
        (tmp_path / "usage").write_bytes(bytes(nbytes))

        ledger = Ledger(str(tmp_path / "usage"))

        assert ledger.needs_scan
        ledger.close()

    def test_its_file_never_has_the_size_of_a_foreign_one(self, tmp_path: Path) -> None:
        sizes: set[int] = set()
        for limit_nbytes in range(20):
            path = tmp_path / f"{limit_nbytes}" / "usage"
            path.parent.mkdir()
            done = subprocess.run(
                [sys.executable, "-c", _FIRST_WRITE, str(path), str(limit_nbytes)], check=False
            )
            assert done.returncode in (0, -signal.SIGXFSZ)
            sizes.add(path.stat().st_size)

        assert sizes == {0, 16}


class TestLock:
    def test_a_holder_without_a_long_wait_does_not_count_as_stopped(self, tmp_path: Path) -> None:
        """The lock is busy for a moment, twice, a second apart. The second holder is about to write."""
        path = str(tmp_path / "usage")
        ledger = Ledger(path)
        ledger.correct(0, 0, ledger.totals(Deadline(LIMIT_S)), Deadline(LIMIT_S))
        holder = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(holder, fcntl.LOCK_EX)
            ledger.add(1, Deadline(0))
            fcntl.flock(holder, fcntl.LOCK_UN)
            time.sleep(1.1)
            fcntl.flock(holder, fcntl.LOCK_EX)
            added, removed = struct.unpack("<QQ", os.pread(holder, 16, 0))
            adding = threading.Thread(target=ledger.add, args=(10, Deadline(LIMIT_S)))
            adding.start()
            adding.join(0.1)
            os.pwrite(holder, struct.pack("<QQ", added + 100, removed), 0)
            fcntl.flock(holder, fcntl.LOCK_UN)
            adding.join(LIMIT_S)
            assert 111 == ledger.totals(Deadline(LIMIT_S)).used
        finally:
            os.close(holder)
            ledger.close()

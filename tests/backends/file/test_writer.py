"""The directory of one writer of the `file` backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from file_roots import opened

from hicache_storage.backend_support.deadline import Deadline


def test_writers_pending_bytes_survive_a_lock_that_is_held(tmp_path: Path) -> None:
    with opened(tmp_path, 20) as storage:
        writer = storage._process.get().writer
        with ThreadPoolExecutor(1) as pool:
            pool.submit(writer._lock.acquire).result()
            writer.add_pending(100, Deadline(0.01))
            pool.submit(writer._lock.release).result()
        assert 100 == writer.pending_nbytes()
        writer.add_pending(-100, Deadline(1))
        assert 0 == writer.pending_nbytes()

"""The parts that all indexes of `hf3fs` share."""

from __future__ import annotations

import threading

import pytest
from hicache_backends.hf3fs.index.base import Limits, Rebuild

from hicache_storage import StorageUnavailable
from hicache_storage.backend_support.deadline import Deadline


class TestLimits:
    LIMITS = Limits(1000, 0.9, 0.5)

    @pytest.mark.parametrize(
        ("used", "wanted", "to_evict"), [(0, 900, 0), (900, 0, 0), (900, 1, 401), (0, 1000, 500)]
    )
    def test_eviction_begins_above_the_high_watermark_and_ends_at_the_low_one(
        self, used: int, wanted: int, to_evict: int
    ) -> None:
        assert to_evict == self.LIMITS.to_evict(used, wanted)

    def test_the_rest_of_the_capacity_is_free(self) -> None:
        assert [1000, 100, 0] == [self.LIMITS.free_nbytes(used) for used in (0, 900, 1100)]

    def test_without_a_capacity_there_is_no_limit(self) -> None:
        unlimited = Limits(None, 0.9, 0.5)

        assert 0 == unlimited.to_evict(1 << 60, 1 << 60)
        assert unlimited.free_nbytes(1 << 60) is None


class TestRebuild:
    def test_work_without_a_thread_is_begun_by_the_next_call(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = list[int]()
        rebuild = Rebuild(lambda: done.append(1))

        def refused(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refused)
            with pytest.raises(StorageUnavailable, match="cannot start a thread"):
                rebuild.run(Deadline(0.1))
        assert not done
        rebuild.run(Deadline(30))
        rebuild.close()

        assert [1] == done

    def test_an_error_of_the_work_is_raised(self) -> None:
        def fail() -> None:
            raise StorageUnavailable("the server is gone")

        with pytest.raises(StorageUnavailable, match="gone"):
            Rebuild(fail).run(Deadline(30))

    def test_a_closed_rebuild_ends_its_work(self) -> None:
        rebuild = Rebuild(lambda: None)
        rebuild.check()
        rebuild.close()
        with pytest.raises(StorageUnavailable, match="closed"):
            rebuild.check()

"""Batches of the `file` backend: full file systems, and what is synced (bytes and names)."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from file_roots import FILE_NBYTES, HASHES, SPACE, opened, used_nbytes
from hicache_backends.file.page_file import TRAILER_NBYTES
from pages import blank, page, space

from hicache_storage import Page
from hicache_storage.backend_support.vectored_io import DIRECT_ALIGNMENT


class TestFullFileSystem:
    def test_no_space_is_false_counted_and_recovers(self, tmp_path: Path) -> None:
        """The process has a mount namespace of its own with a tmpfs of 256 KiB."""
        command = f"mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -"
        unshare = shutil.which("unshare")
        if unshare is None or subprocess.run([unshare, "-Urm", "true"], check=False).returncode:
            pytest.skip("no user namespaces here")
        done = subprocess.run(
            [unshare, "-Urm", "sh", "-c", command],
            input=_FULL.replace("ROOT", str(tmp_path)),
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2] / "support"), *sys.path]
                ),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert (0, "fine\n") == (done.returncode, done.stdout), done.stderr

    def test_a_file_size_limit_is_false_and_leaves_nothing(self, tmp_path: Path) -> None:
        with opened(tmp_path / "root", None) as storage:
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
            try:
                verdicts = storage.batch_set(SPACE, HASHES[:3], [page()] * 3)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

            assert [False] * 3 == verdicts
            assert 3 == storage.stats().counters["refused_no_space"]
            assert 0 == used_nbytes(tmp_path / "root") == storage.stats().nbytes
            assert [] == [p for p in (tmp_path / "root").glob("writers/*/*") if p.name != "lock"]
            assert [True] * 3 == storage.batch_set(SPACE, HASHES[:3], [page()] * 3)

    @pytest.mark.usefixtures("python_data_plane")
    def test_the_rest_of_a_refused_batch_is_not_tried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = list[int]()

        def full(*args: Any) -> int:
            tries.append(1)
            raise OSError(28, "No space left on device")

        with opened(tmp_path / "root", None) as storage:
            monkeypatch.setattr(os, "pwritev", full)
            assert not any(storage.batch_set(SPACE, HASHES[:50], [page()] * 50))
            monkeypatch.undo()

        assert 1 == len(tries)


_FULL = """
import sys
sys.path.insert(0, "tests/support")
from pages import blank, hash_of, page, space
from hicache_backends.file import FileStorage
sp = space()
hashes = [hash_of(n) for n in range(100)]
with FileStorage.from_config({"path": "ROOT/plain"}) as storage:
    verdicts = storage.batch_set(sp, hashes, [page()] * 100)
    stored = verdicts.count(True)
    assert 10 < stored < 100, stored
    assert verdicts == [True] * stored + [False] * (100 - stored)
    assert storage.stats().counters["refused_no_space"] == 100 - stored
    assert storage.batch_get(sp, hashes, [blank() for _ in hashes]) == verdicts
    assert storage.batch_set(sp, hashes[99:], [page()]) == [False]
    assert all(storage.batch_delete(sp, hashes[:5]))
    assert storage.batch_set(sp, hashes[99:], [page()]) == [True]
with FileStorage.from_config({"path": "ROOT/plain", "capacity_nbytes": "1GiB"}) as storage:
    for start in range(200, 1000, 10):
        more = [hash_of(n) for n in range(start, start + 10)]
        assert all(storage.batch_set(sp, more, [page()] * 10)), "eviction made room"
    assert "refused_no_space" not in storage.stats().counters
print("fine")
"""


class TestPower:
    def test_data_is_synced_before_the_name_and_the_name_before_the_verdict(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = list[str]()
        names: dict[int, str] = {}
        real_open = os.open

        def opening(path: str, *args: Any, **kwargs: Any) -> int:
            fd = real_open(path, *args, **kwargs)
            names[fd] = str(path)
            return fd

        def noting(name: str, real: Any) -> Any:
            def call(first: Any, *args: Any, **kwargs: Any) -> Any:
                calls.append(f"{name} {names.get(first, first)}")
                return real(first, *args, **kwargs)

            return call

        with opened(root, durability="power") as storage:
            monkeypatch.setattr(os, "open", opening)
            for name in ("fdatasync", "fsync", "rename"):
                monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            monkeypatch.undo()

        directory = f"{root}/spaces/{SPACE.id}"
        shard = f"{directory}/{HASHES[0][:2]}"
        steps = [call.split(" ")[0] for call in calls]
        assert steps[0] == "fdatasync"
        assert "rename" in steps
        assert steps.index("rename") < steps.index("fsync")
        assert {f"fsync {shard}", f"fsync {directory}"} <= set(calls)

    @pytest.mark.parametrize(
        ("nbytes", "shift", "segments"),
        [
            (2 << 20, 0, 1),
            (2 << 20, 0, 8),
            (2 << 20, 1, 1),
            ((2 << 20) + 1, 0, 1),
            (4096, 0, 1),
            (100, 0, 1),
        ],
        ids=["direct", "direct-segments", "odd-address", "odd-size", "small", "tiny"],
    )
    def test_pages_read_back_however_they_were_written(
        self, root: Path, nbytes: int, shift: int, segments: int
    ) -> None:
        import mmap

        key_space = space(page_nbytes=nbytes)
        with mmap.mmap(-1, nbytes + 2 * DIRECT_ALIGNMENT) as memory, memoryview(memory) as view:
            view[shift : shift + nbytes] = page(nbytes).segments[0]
            step = nbytes // segments
            source = Page(
                *(view[shift + n * step : shift + (n + 1) * step] for n in range(segments))
            )
            with opened(root, durability="power") as storage:
                assert [True] == storage.batch_set(key_space, HASHES[:1], [source])
            for segment in source.segments:
                segment.release()
            del source
        target = blank(nbytes)
        with opened(root) as storage:
            assert [True] == storage.batch_get(key_space, HASHES[:1], [target])
            assert page(nbytes).tobytes() == target.tobytes()
            assert nbytes + TRAILER_NBYTES == used_nbytes(root)

    def test_a_refused_direct_write_falls_back(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import mmap

        nbytes = 2 << 20
        real = os.open
        flags = list[int]()

        def refusing(path: str, flag: int, *args: Any, **kwargs: Any) -> int:
            if flag & os.O_DIRECT:
                flags.append(flag)
                raise OSError(22, "Invalid argument")
            return real(path, flag, *args, **kwargs)

        key_space = space(page_nbytes=nbytes)
        with mmap.mmap(-1, nbytes) as memory:
            monkeypatch.setattr(os, "open", refusing)
            with opened(root, durability="power") as storage:
                assert 1 == storage.capabilities.alignment
                view = memoryview(memory)
                assert [True] == storage.batch_set(key_space, HASHES[:1], [Page(view)])
                assert [True] == storage.batch_get(key_space, HASHES[:1], [blank(nbytes)])
                view.release()
        assert 2 == len(flags)

    def test_a_page_that_was_not_synced_is_written_again(self, root: Path) -> None:
        with opened(root) as storage:
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
        (path,) = root.glob("spaces/*/??/*")
        before = path.read_bytes()
        with opened(root, durability="power") as storage:
            for _ in range(2):
                assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            assert FILE_NBYTES == storage.stats().nbytes
            after = path.read_bytes()
        assert before != after
        assert before[:4096] == after[:4096]

    def test_a_name_that_cannot_be_synced_is_refused_and_gone(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(fd: int) -> None:
            raise OSError(5, "Input/output error")

        with opened(root, durability="power") as storage:
            monkeypatch.setattr(os, "fsync", failing)
            assert [False] == storage.batch_set(SPACE, HASHES[:1], [page()])
            monkeypatch.undo()
            assert [False] == storage.batch_exists(SPACE, HASHES[:1])
            assert 0 == storage.stats().nbytes

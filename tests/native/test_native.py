"""The compiled data plane and the one in Python give the same verdicts, bytes and files."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import pytest
import xxhash
from data_planes import BOTH, NEEDS_COMPILED, compiled
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import native
from hicache_storage.native import HIT, KEPT, LATE, MISS, UNSYNCED, WRONG, reference

SOON_S = 3600.0
RUN = bytearray(1)
NS = 1_700_000_000_000_000_000

pages = st.lists(st.lists(st.binary(max_size=700), max_size=5), max_size=5)
states = st.sampled_from(
    [
        "whole",
        "synced",
        "absent",
        "short",
        "long",
        "renamed",
        "unsealed",
        "directory",
        "link",
        "empty",
    ]
)


def trailer_of(name: bytes, nonce: bytes, *, synced: bool = False) -> bytes:
    body = name + bytes([synced]) + nonce
    return body + xxhash.xxh3_64_digest(body)


def name_of(number: int) -> bytes:
    return b"HiPg" + bytes([1, 0, 0, 0]) + number.to_bytes(32, "big")


def put(path: Path, state: str, page: bytes, name: bytes, nonce: bytes) -> None:
    """Make a file in the given `state` at `path`."""
    trailer = trailer_of(name, nonce, synced=state == "synced")
    content = {
        "short": page[:-1] + trailer,
        "long": page + trailer + b"x",
        "renamed": page + trailer_of(name_of(999), nonce),
        "unsealed": page + trailer[:-1] + bytes([trailer[-1] ^ 1]),
        "empty": b"",
    }.get(state, page + trailer)
    if state == "directory":
        path.mkdir()
    elif state == "link":
        path.with_suffix(".target").write_bytes(content)
        path.symlink_to(path.with_suffix(".target"))
    elif state != "absent":
        path.write_bytes(content)


def cut(page: bytes, at: list[int]) -> list[bytearray]:
    """Cut `page` into writable pieces, some of them empty."""
    edges = [0, *sorted(edge % (len(page) + 1) for edge in at), len(page)]
    return [bytearray(page[start:end]) for start, end in pairwise(edges)]


@pytest.mark.parametrize("module", BOTH)
@settings(deadline=None)  # The machine may be busy.
@given(pages=pages)
def test_digests_are_those_of_xxhash(module: Any, pages: list[list[bytes]]) -> None:
    expected = [xxhash.xxh3_64_intdigest(b"".join(page)) for page in pages]

    assert expected == module.digests(pages)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("nbytes", [*range(300), 511, 512, 513, 1023, 1024, 1025, 4096, 100_003])
def test_a_digest_of_any_length_is_that_of_xxhash(module: Any, nbytes: int) -> None:
    page = bytes(index * 7 % 251 for index in range(nbytes))
    pieces = [page[: nbytes // 3], page[nbytes // 3 : nbytes // 2], page[nbytes // 2 :]]

    assert [xxhash.xxh3_64_intdigest(page)] * 2 == module.digests([[page], pieces])


@NEEDS_COMPILED
def test_every_function_is_compiled() -> None:
    functions = {name for name in native.__all__ if callable(getattr(native, name))}

    assert functions == {name for name in dir(compiled) if callable(getattr(compiled, name))}


@NEEDS_COMPILED
@settings(max_examples=150, deadline=None)
@given(
    states=st.lists(states, max_size=6),
    nbytes=st.integers(1, 3000),
    at=st.lists(st.integers(0, 3000), max_size=80),
    skip=st.integers(-1, 200),
    touched=st.booleans(),
    interval_ns=st.sampled_from([0, 10**18]),
)
def test_reads_of_both_are_equal(  # noqa: PLR0917 - Hypothesis passes them by name
    states: list[str],
    nbytes: int,
    at: list[int],
    skip: int,
    touched: bool,  # noqa: FBT001
    interval_ns: int,
) -> None:
    seen = list[Any]()
    for module in (reference, compiled):
        with TemporaryDirectory() as folder:
            paths = [Path(folder) / str(number) for number in range(len(states))]
            for number, (path, state) in enumerate(zip(paths, states, strict=True)):
                page = bytes((number + index) % 256 for index in range(nbytes))
                put(path, state, page, name_of(number), bytes(15))
                if path.is_file():
                    os.utime(path, ns=(NS, NS))
            encoded = [os.fsencode(path) for path in paths]
            names = [name_of(number) for number in range(len(states))]
            memory = [cut(bytes(nbytes), at) for _ in states]
            by_s = time.monotonic() + SOON_S
            when_ns = NS + 5 if touched else -1
            verdicts, values = module.read_files(
                encoded, names, memory, nbytes, when_ns, interval_ns, skip, by_s
            )
            hits = [
                b"".join(page) if verdict == HIT else b""
                for page, verdict in zip(memory, verdicts, strict=True)
            ]
            times = [path.stat().st_mtime_ns if path.is_file() else 0 for path in paths]
            exists = module.exists_files(encoded, nbytes + 64, by_s)
            checks = module.check_files(encoded, names, nbytes, -1, by_s)
            seen.append((verdicts, values, hits, times, exists, checks))

    assert seen[0] == seen[1]


@NEEDS_COMPILED
@settings(max_examples=100, deadline=None)
@given(
    states=st.lists(states, max_size=6),
    nbytes=st.integers(1, 3000),
    at=st.lists(st.integers(0, 3000), max_size=80),
    recycled=st.integers(0, 6),
    there=st.booleans(),
)
def test_writes_of_both_are_equal(
    states: list[str],
    nbytes: int,
    at: list[int],
    recycled: int,
    there: bool,  # noqa: FBT001
) -> None:
    seen = list[Any]()
    for module in (reference, compiled):
        with TemporaryDirectory() as folder:
            paths = [Path(folder) / str(number) for number in range(len(states))]
            for number, (path, state) in enumerate(zip(paths, states, strict=True)):
                put(path, state, bytes(nbytes), name_of(number), bytes(15))
            target = Path(folder) / "to"
            if there:
                target.mkdir()
            page = bytes(index % 256 for index in range(nbytes))
            verdicts = module.write_files(
                [os.fsencode(path) for path in paths],
                [os.fsencode(target / path.name) for path in paths],
                [trailer_of(name_of(number), b"n" * 15) for number in range(len(states))],
                [cut(page, at)] * len(states),
                nbytes,
                NS,
                recycled,
                time.monotonic() + SOON_S,
                RUN,
            )
            left = sorted(
                (str(path.relative_to(folder)), path.read_bytes(), path.stat().st_mtime_ns == NS)
                for path in Path(folder).rglob("*")
                if path.is_file() and not path.is_symlink()
            )
            seen.append((verdicts, [(name, content) for name, content, _ in left]))

    assert seen[0] == seen[1]


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    data=st.binary(max_size=3000),
    target_cuts=st.lists(st.integers(0, 3000), max_size=5),
    source_cuts=st.lists(st.integers(0, 3000), max_size=5),
    skip=st.integers(-1, 200),
)
def test_copies_of_both_are_equal(
    data: bytes, target_cuts: list[int], source_cuts: list[int], skip: int
) -> None:
    found = list[Any]()
    for module in (reference, compiled):
        targets = [bytearray(piece) for piece in cut(bytes(len(data)), target_cuts)]
        sources = cut(data, source_cuts)
        digests = module.copy_pages([targets, targets], [sources, sources], skip)
        assert data == b"".join(targets)
        found.append(digests)

    assert (
        found[0] == found[1] == ([xxhash.xxh3_64_intdigest(data[skip:])] * 2 if skip >= 0 else [])
    )


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("module", BOTH)
def test_a_large_page_is_copied_whole(module: Any, far: bool) -> None:  # noqa: FBT001
    data = os.urandom(1_000_001)
    into = [bytearray(400_000), bytearray(600_001)]

    assert [xxhash.xxh3_64_intdigest(data[128:])] == module.copy_pages([into], [[data]], 128, far)
    assert data == b"".join(into)
    assert [] == module.copy_pages([into], [[data[::-1]]], -1, far)
    assert data[::-1] == b"".join(into)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize("start", [0, 1, 16, 4095])
@pytest.mark.parametrize("nbytes", [(32 << 10) - 1, 32 << 10, (64 << 10) + 1025])
def test_a_far_copy_and_its_digest_do_not_depend_on_the_address(
    module: Any, start: int, nbytes: int
) -> None:
    source, target = memoryview(os.urandom(start + nbytes)), memoryview(bytearray(8 + nbytes))
    page, into = source[start:], target[start % 9 : start % 9 + nbytes]

    expected = [xxhash.xxh3_64_intdigest(page)]
    assert expected == module.digests([[page]])
    assert expected == module.copy_pages([[into]], [[page]], 0, True)
    assert page == into


@pytest.mark.parametrize("module", BOTH)
def test_pages_of_other_sizes_are_not_copied(module: Any) -> None:
    into = bytearray(10)
    for targets, sources in (([[into]], [[bytes(9)]]), ([[into]], [])):
        with pytest.raises(ValueError, match="do not fit together"):
            module.copy_pages(targets, sources, -1)


@pytest.mark.parametrize("module", BOTH)
def test_a_page_that_was_written_is_read(module: Any, tmp_path: Path) -> None:
    page = [bytearray(b"head"), bytearray(os.urandom(700_000))]
    nbytes = 700_004
    path, target = os.fsencode(tmp_path / "new"), os.fsencode(tmp_path / "page")
    trailer = trailer_of(name_of(1), b"n" * 15)
    by_s = time.monotonic() + SOON_S
    into = [bytearray(4), bytearray(700_000)]

    assert [HIT] == module.write_files(
        [path], [target], [trailer], [page], nbytes, NS, 0, by_s, RUN
    )
    assert [UNSYNCED] == module.check_files([target], [name_of(1)], nbytes, -1, by_s)
    assert ([HIT], [xxhash.xxh3_64_intdigest(page[1])]) == module.read_files(
        [target], [name_of(1)], [into], nbytes, NS, 0, 4, by_s
    )
    assert page == into


@pytest.mark.parametrize("module", BOTH)
def test_after_the_deadline_nothing_is_touched(module: Any, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "new")
    page = [bytearray(10)]
    trailer = trailer_of(name_of(1), b"n" * 15)

    assert [LATE] == module.exists_files([path], 10, 0.0)
    assert [LATE] == module.check_files([path], [name_of(1)], 10, -1, 0.0)
    assert ([LATE], [0]) == module.read_files([path], [name_of(1)], [page], 10, -1, 0, 0, 0.0)
    assert [LATE] == module.write_files([path], [path], [trailer], [page], 10, NS, 0, 0.0, RUN)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("module", BOTH)
def test_an_error_ends_a_batch_of_writes(module: Any, tmp_path: Path) -> None:
    (tmp_path / "2").write_bytes(b"this file is in the way")
    paths = [os.fsencode(tmp_path / str(number)) for number in range(1, 4)]
    targets = [path + b"-" for path in paths]
    trailers = [trailer_of(name_of(number), b"n" * 15) for number in range(1, 4)]
    by_s = time.monotonic() + SOON_S

    assert [HIT, -errno.EEXIST, MISS] == module.write_files(
        paths, targets, trailers, [[bytes(10)]] * 3, 10, NS, 0, by_s, RUN
    )
    assert not (tmp_path / "3-").exists()


@pytest.mark.parametrize("module", BOTH)
def test_a_synced_page_is_not_overwritten(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "old"
    put(path, "synced", bytes(10), name_of(1), bytes(15))
    before = path.read_bytes()
    trailer = trailer_of(name_of(2), b"n" * 15)
    arguments = ([os.fsencode(path)], [os.fsencode(tmp_path / "new")], [trailer], [[b"0123456789"]])

    assert [KEPT] == module.write_files(*arguments, 10, NS, 1, time.monotonic() + SOON_S, RUN)
    assert before == path.read_bytes()


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "wrong", [{"nbytes": 11}, {"names": [b"short"]}, {"pages": []}, {"names": [name_of(1)] * 2}]
)
def test_batches_that_do_not_fit_are_refused(module: Any, wrong: dict[str, Any]) -> None:
    given = {
        "paths": [b"/none"],
        "names": [name_of(1)],
        "pages": [[bytearray(10)]],
        "nbytes": 10,
        **wrong,
    }

    with pytest.raises(ValueError, match="do not fit together"):
        module.read_files(*given.values(), -1, 0, -1, time.monotonic() + SOON_S)


@pytest.mark.parametrize("module", BOTH)
def test_pages_in_read_only_memory_can_be_written_and_not_read_into(
    module: Any, tmp_path: Path
) -> None:
    path = os.fsencode(tmp_path / "page")
    trailer = trailer_of(name_of(1), b"n" * 15)
    by_s = time.monotonic() + SOON_S
    assert [HIT] == module.write_files(
        [path + b"-"], [path], [trailer], [[b"0123456789"]], 10, NS, 0, by_s, RUN
    )

    with pytest.raises((BufferError, TypeError, ValueError)):
        module.read_files([path], [name_of(1)], [[b"0123456789"]], 10, -1, 0, -1, by_s)


@pytest.mark.parametrize("module", BOTH)
def test_a_missing_directory_is_a_miss_to_look_for_and_an_error_to_read(
    module: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    path = os.fsencode(tmp_path / "file" / "page")
    by_s = time.monotonic() + SOON_S

    assert [MISS] == module.exists_files([path], 10, by_s)
    assert module.check_files([path], [name_of(1)], 10, -1, by_s) != [WRONG]


@pytest.mark.parametrize("module", BOTH)
def test_a_stopped_batch_writes_no_more_pages(module: Any, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path / "page")
    trailer = trailer_of(name_of(1), b"n" * 15)
    by_s = time.monotonic() + SOON_S

    assert [MISS] == module.write_files(
        [path + b"-"], [path], [trailer], [[b"0123456789"]], 10, NS, 0, by_s, bytearray(b"\1")
    )
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("change", "most_kept", "verdict"),
    [
        ("none", 1, KEPT),
        ("none", 0, HIT),
        ("touched", 1, MISS),
        ("longer", 1, MISS),
        ("gone", 1, MISS),
        ("linked", 1, HIT),
        ("nowhere", 1, MISS),
    ],
)
def test_a_file_is_claimed_as_it_was_seen(
    module: Any, tmp_path: Path, change: str, most_kept: int, verdict: int
) -> None:
    path, target = tmp_path / "page", tmp_path / "claimed"
    path.write_bytes(bytes(10))
    os.utime(path, ns=(NS, NS))
    if change == "touched":
        os.utime(path, ns=(NS, NS + 1))
    elif change == "longer":
        path.write_bytes(bytes(11))
        os.utime(path, ns=(NS, NS))
    elif change == "gone":
        path.unlink()
    elif change == "linked":
        os.link(path, tmp_path / "other")
    elif change == "nowhere":
        target = tmp_path / "absent" / "claimed"
    names = [os.fsencode(path)], [os.fsencode(target)]
    by_s = time.monotonic() + SOON_S

    assert [verdict] == module.claim_files(*names, [NS], [10], 10, most_kept, by_s)
    assert (verdict == KEPT) == target.exists()
    assert path.exists() == (change in ("touched", "longer", "nowhere"))


@pytest.mark.parametrize("module", BOTH)
def test_no_more_files_are_kept_than_wanted(module: Any, tmp_path: Path) -> None:
    """The second file has another size than new pages will have, so it is not kept for reuse."""
    sizes = [10, 11, 10, 10]
    paths = [tmp_path / str(number) for number in range(4)]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
        os.utime(path, ns=(NS, NS))
    encoded = [os.fsencode(path) for path in paths]
    targets = [path + b"-" for path in encoded]
    by_s = time.monotonic() + SOON_S

    assert [KEPT, HIT, KEPT, HIT] == module.claim_files(
        encoded, targets, [NS] * 4, sizes, 10, 2, by_s
    )
    assert {"0-", "2-"} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("module", BOTH)
def test_claims_that_do_not_fit_are_refused(module: Any) -> None:
    by_s = time.monotonic() + SOON_S

    assert [LATE] == module.claim_files([b"/none"], [b"/to"], [NS], [10], 10, 1, 0.0)
    for targets in ([], [b""], [b"/to"] * 2):
        with pytest.raises(ValueError, match=r"fit|path"):
            module.claim_files([b"/none"], targets, [NS], [10], 10, 1, by_s)


@pytest.mark.parametrize("module", BOTH)
def test_a_page_of_no_bytes_has_its_trailer(module: Any, tmp_path: Path) -> None:
    new, page = os.fsencode(tmp_path / "new"), os.fsencode(tmp_path / "page")
    trailer = trailer_of(name_of(1), b"n" * 15)
    by_s = time.monotonic() + SOON_S

    assert [HIT] == module.write_files([new], [page], [trailer], [[]], 0, NS, 0, by_s, RUN)
    assert trailer == (tmp_path / "page").read_bytes()
    assert [HIT] == module.read_files([page], [name_of(1)], [[]], 0, -1, 0, -1, by_s)[0]


# Listings of directories and looks at files: both data planes give the same results.

PAGE = "ab" * 32

file_names = st.one_of(
    st.text("0123456789abcdef", min_size=31, max_size=33),
    st.text("0123456789abcdef", min_size=127, max_size=129),
    st.text("0123456789abcdefA.-", min_size=32, max_size=40).filter(lambda name: name.strip(".")),
)


@NEEDS_COMPILED
@settings(deadline=None)
@given(names=st.sets(file_names, max_size=8), kinds=st.lists(st.sampled_from("fdl"), min_size=8))
def test_lists_of_both_are_equal(
    tmp_path_factory: pytest.TempPathFactory, names: set[str], kinds: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    for name, kind in zip(sorted(names), kinds, strict=False):
        if kind == "f":
            (folder / name).touch()
        elif kind == "d":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(folder)
    path = [os.fsencode(folder)]
    found = [module.list_directories(path) for module in (reference, compiled)]

    assert [HIT] == found[0][0] == found[1][0]
    assert sorted(found[0][1][0]) == sorted(found[1][1][0])


@pytest.mark.parametrize("module", BOTH)
class TestListDirectories:
    def test_each_directory_has_its_own_list(self, module: Any, tmp_path: Path) -> None:
        for number in range(3):
            (tmp_path / str(number)).mkdir()
            (tmp_path / str(number) / f"{number:02x}{PAGE}").touch()
        paths = [os.fsencode(tmp_path / str(number)) for number in range(3)]

        lists = [[f"{number:02x}{PAGE}"] for number in range(3)]
        assert ([HIT] * 3, lists) == module.list_directories(paths)

    def test_many_files_are_listed(self, module: Any, tmp_path: Path) -> None:
        names = {f"{number:064x}" for number in range(1000)}
        for name in names:
            (tmp_path / name).touch()
        (verdict,), (listed,) = module.list_directories([os.fsencode(tmp_path)])

        assert HIT == verdict
        assert sorted(names) == sorted(listed)

    def test_a_path_of_no_directory_is_a_miss(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to(tmp_path)
        paths = [os.fsencode(tmp_path / name) for name in ("absent", "file", "link", "file/x")]

        assert ([MISS] * 4, [[]] * 4) == module.list_directories(paths)

    def test_a_name_that_is_too_long_is_an_error(self, module: Any, tmp_path: Path) -> None:
        path = os.fsencode(tmp_path / ("x" * 300))

        assert ([-errno.ENAMETOOLONG], [[]]) == module.list_directories([path])

    @pytest.mark.parametrize("name", [b"", b"a\0b"])
    def test_a_value_that_is_no_path_is_refused(self, module: Any, name: bytes) -> None:
        with pytest.raises(ValueError, match="not a path"):
            module.list_directories([name])


@pytest.mark.parametrize("module", BOTH)
def test_modes_are_those_of_links_themselves(module: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    paths = [tmp_path, tmp_path / "file", tmp_path / "link"]
    expected = [path.lstat().st_mode for path in paths]
    paths += [tmp_path / "absent", tmp_path / "file" / "x", tmp_path / ("x" * 300)]

    assert [*expected, 0, 0, -errno.ENAMETOOLONG] == module.modes_of(list(map(os.fsencode, paths)))
    with pytest.raises(ValueError, match="not a path"):
        module.modes_of([b""])


@pytest.mark.parametrize("module", BOTH)
class TestStatFiles:
    def test_a_file_has_its_time_and_size(self, module: Any, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(bytes(7))
        os.utime(path, ns=(5, 1_700_000_000_123_456_789))

        assert ([HIT], [1_700_000_000_123_456_789], [7]) == module.stat_files(
            [os.fsencode(path)], time.monotonic() + SOON_S
        )

    def test_a_path_of_no_file_is_a_miss(self, module: Any, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        paths = [os.fsencode(path) for path in (tmp_path, tmp_path / "link", tmp_path / "absent")]
        by_s = time.monotonic() + SOON_S

        assert ([MISS] * 3, [0] * 3, [0] * 3) == module.stat_files(paths, by_s)

    def test_after_the_deadline_files_are_late(self, module: Any, tmp_path: Path) -> None:
        assert ([LATE], [0], [0]) == module.stat_files([os.fsencode(tmp_path)], 0.0)

    def test_a_value_that_is_no_path_is_refused(self, module: Any) -> None:
        with pytest.raises(ValueError, match="not a path"):
            module.stat_files([b""], SOON_S)


# Small files that processes change under a lock: both data planes give the same verdicts and bytes.


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    record=st.one_of(
        st.binary(max_size=20),
        st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)).map(
            lambda t: struct.pack("<QQ", *t)
        ),
    ),
    added=st.integers(0, 2**40),
    removed=st.integers(0, 2**62),
)
def test_changes_of_totals_of_both_are_equal(record: bytes, added: int, removed: int) -> None:
    found = list[Any]()
    for module in (reference, compiled):
        with TemporaryFile() as anonymous, TemporaryDirectory() as folder:
            path = Path(folder) / "usage"
            path.write_bytes(record)
            with path.open("r+b") as file:
                verdict, *totals = module.change_totals(file.fileno(), added, removed, 0.0)
            found.append((verdict, totals if verdict == HIT else [], path.read_bytes()))
            assert MISS == module.change_totals(anonymous.fileno(), added, removed, 0.0)[0]

    assert found[0] == found[1]


@pytest.mark.parametrize("module", BOTH)
def test_totals_whose_lock_is_held_are_late_and_as_they_were(module: Any, tmp_path: Path) -> None:
    path = tmp_path / "usage"
    path.write_bytes(struct.pack("<QQ", 10, 4))
    with path.open("r+b") as holder, path.open("r+b") as file:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert LATE == module.change_totals(file.fileno(), 1, 1, 0.001)[0]
        fcntl.flock(holder, fcntl.LOCK_UN)

        assert (HIT, 11, 5) == module.change_totals(file.fileno(), 1, 1, 0.001)
        fcntl.flock(holder, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Frames, trailers and paths: both data planes give the same bytes and verdicts.

SPACE_ID = bytes(range(16))
HASH = "ab" * 32

hashes = st.lists(st.binary(min_size=16, max_size=64).map(bytes.hex), max_size=6)
words = st.integers(0, 2**64 - 1)


@NEEDS_COMPILED
@settings(deadline=None)
@given(directory=st.binary(max_size=40), prefix=st.binary(min_size=24, max_size=24), names=hashes)
def test_paths_and_names_of_both_are_equal(
    directory: bytes, prefix: bytes, names: list[str]
) -> None:
    wanted = reference.page_files(directory, prefix, names)

    assert wanted == compiled.page_files(directory, prefix, names)


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    names=st.lists(st.binary(min_size=40, max_size=41), max_size=4),
    synced=st.booleans(),
    token=st.binary(min_size=8, max_size=8),
    serial=st.integers(0, 2**56 - 9),
)
def test_trailers_of_both_are_equal(
    names: list[bytes],
    synced: bool,  # noqa: FBT001
    token: bytes,
    serial: int,
) -> None:
    serials = range(serial, serial + len(names))
    wanted = reference.page_trailers(names, synced, token, serials)

    assert wanted == compiled.page_trailers(names, synced, token, serials)


@NEEDS_COMPILED
@settings(deadline=None)
@given(names=hashes, nbytes=words, checksum=words, size=st.sampled_from([128, 129, 512]))
def test_frames_of_both_are_equal(names: list[str], nbytes: int, checksum: int, size: int) -> None:
    written = list[list[bytearray]]()
    for checksums in ([checksum] * len(names), None):
        for module in (reference, compiled):
            headers = [bytearray(b"\xee" * size) for _ in names]
            module.write_frames(headers, names, SPACE_ID, nbytes, checksums)
            written.append(headers)

    assert written[0] == written[1]
    assert written[2] == written[3]


@NEEDS_COMPILED
@settings(deadline=None)
@given(
    made=st.binary(min_size=16, max_size=64).map(bytes.hex),
    asked=st.binary(min_size=16, max_size=64).map(bytes.hex),
    bit=st.integers(-1, 8 * 256 - 1),
    has_checksum=st.booleans(),
)
def test_verdicts_on_frames_of_both_are_equal(
    made: str,
    asked: str,
    bit: int,
    has_checksum: bool,  # noqa: FBT001
) -> None:
    header = bytearray(256)
    reference.write_frames([header], [made], SPACE_ID, 1000, [7])
    if bit >= 0:
        header[bit // 8] ^= 1 << bit % 8
    arguments = ([header, header], [made, asked], SPACE_ID, 1000, [7, 7] if has_checksum else None)

    assert reference.check_frames(*arguments) == compiled.check_frames(*arguments)


@pytest.mark.parametrize("module", BOTH)
def test_a_frame_passes_under_its_own_fields_alone(module: Any) -> None:
    header = bytearray(128)
    module.write_frames([header], [HASH], SPACE_ID, 1000, [7])

    assert [HIT] == module.check_frames([header], [HASH], SPACE_ID, 1000, [7])
    assert [HIT] == module.check_frames([header], [HASH], SPACE_ID, 1000, None)
    assert [WRONG] == module.check_frames([header], ["cd" * 32], SPACE_ID, 1000, [7])
    assert [WRONG] == module.check_frames([header], [HASH], bytes(16), 1000, [7])
    assert [WRONG] == module.check_frames([header], [HASH], SPACE_ID, 1001, [7])
    assert [WRONG] == module.check_frames([header], [HASH], SPACE_ID, 1000, [8])


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "page_hash", ["", "ab" * 15, "ab" * 65, "ab" * 16 + "a", "AB" * 32, "../" * 16]
)
def test_a_malformed_hash_is_refused(module: Any, page_hash: str) -> None:
    with pytest.raises(ValueError, match="not a page hash"):
        module.page_files(b"/d", bytes(24), [page_hash])
    with pytest.raises(ValueError, match="not a page hash"):
        module.write_frames([bytearray(128)], [page_hash], SPACE_ID, 1, None)
    with pytest.raises(ValueError, match="not a page hash"):
        module.check_frames([bytearray(128)], [page_hash], SPACE_ID, 1, None)


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": [bytearray(127)]},
        {"headers": []},
        {"names": [HASH] * 2},
        {"space_id": bytes(15)},
        {"checksums": []},
    ],
)
def test_arguments_that_do_not_fit_are_refused(module: Any, wrong: dict[str, Any]) -> None:
    given_ = {
        "headers": [bytearray(128)],
        "names": [HASH],
        "space_id": SPACE_ID,
        "nbytes": 1,
        "checksums": [1],
        **wrong,
    }

    for function in (module.write_frames, module.check_frames):
        with pytest.raises(ValueError, match="do not fit together"):
            function(*given_.values())


@pytest.mark.parametrize("module", BOTH)
def test_trailers_and_prefixes_of_wrong_sizes_are_refused(module: Any) -> None:
    with pytest.raises(ValueError, match="24 bytes"):
        module.page_files(b"/d", bytes(23), [HASH])
    for names, token, serials in (
        ([bytes(39)], bytes(8), [0]),
        ([bytes(40)], bytes(7), [0]),
        ([bytes(40)], bytes(8), []),
    ):
        with pytest.raises(ValueError, match="do not fit together"):
            module.page_trailers(names, False, token, serials)

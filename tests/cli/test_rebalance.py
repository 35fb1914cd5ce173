"""`hicache copy` of a store with stripes onto itself: pages move to their stripes, and none is lost."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, SPACE, CliStore, run_json, save
from composed_stores import file_member
from hicache_backends.file import FileStorage
from pages import blank, hash_of, page
from sealed_stores import key_files
from stores import HookedStorage

from hicache_storage.cli import main
from hicache_storage.page_store import PageStore, Transfer
from hicache_storage.page_store.results import Verdict
from hicache_storage.storage import Capabilities

COUNT = 60


def stripes(root: Path, names: str, **config: Any) -> dict[str, Any]:
    return {"stripes": [file_member(name, root / name, **config) for name in names]}


def striped(root: Path, names: str, **config: Any) -> CliStore:
    return CliStore("striped", stripes(root, names, **config))


def tiered(root: Path, names: str) -> CliStore:
    nvme = {"name": "nvme", "backend": "striped", "config": stripes(root, names)}
    return CliStore("tiered", {"tiers": [nvme, file_member("bucket", root / "bucket")]})


def sealed(root: Path, names: str) -> CliStore:
    inner = {"backend": "striped", "config": stripes(root, names)}
    return CliStore("encrypted", {**inner, **key_files(root)})


def nested(root: Path, names: str) -> CliStore:
    """Two stripes, one of which has the stripes `names`."""
    inner = {"name": "x", "backend": "striped", "config": stripes(root / "x", names)}
    return CliStore("striped", {"stripes": [inner, file_member("y", root / "y")]})


def rebalanced(
    capsys: pytest.CaptureFixture[str], store: CliStore, *flags: str
) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    return run_json(capsys, "copy", *store.flags, *store.target_flags, *flags)


def misplaced(capsys: pytest.CaptureFixture[str], store: CliStore) -> int:
    """Return how many pages lie on a wrong stripe."""
    capsys.readouterr()
    return sum(run_json(capsys, "verify", *store.flags)[1]["misplaced"].values())


def loaded(store: CliStore) -> list[bool]:
    """Return which pages an engine gets. Check their bytes."""
    hashes, pages = [hash_of(n) for n in range(COUNT)], [blank() for _ in range(COUNT)]
    with store.open() as storage, PageStore(storage) as pages_of:
        (verdicts,) = pages_of.load([Transfer(SPACE, hashes, pages)]).verdicts
    assert {*verdicts} <= {Verdict.OK, Verdict.MISS}
    hits = [verdict is Verdict.OK for verdict in verdicts]
    for number, (hit, target) in enumerate(zip(hits, pages, strict=True)):
        assert not hit or target.tobytes() == page(seed=number).tobytes()
    return hits


def files_in(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("spaces/*/??/*")}


def pages_in(root: Path) -> set[str]:
    return {path.name for path in files_in(root)}


def break_file(path: Path) -> None:
    """Flip a bit of a page."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("shape", [striped, tiered, sealed, nested])
def test_pages_move_to_a_stripe_that_was_added(
    shape: Callable[[Path, str], CliStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape(tmp_path, "ab").fill(range(COUNT))
    store = shape(tmp_path, "abc")
    store.open().close()
    moved = misplaced(capsys, store)
    assert 0 < moved < COUNT
    before = files_in(tmp_path)
    assert (0, moved) == _counted(rebalanced(capsys, store, "--dry-run"))
    assert before == files_in(tmp_path)

    code, found = rebalanced(capsys, store)

    assert (0, moved, moved) == (code, found["copied_pages"], found["removed_pages"])
    assert loaded(store) == [True] * COUNT
    assert 0 == misplaced(capsys, store)
    assert len(before) == len(files_in(tmp_path))
    after = files_in(tmp_path)
    assert (0, 0) == _counted(rebalanced(capsys, store))
    assert after == files_in(tmp_path)


def _counted(found: tuple[int, dict[str, Any]]) -> tuple[int, int]:
    return found[0], found[1]["copied_pages"]


def test_a_stripe_that_was_added_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    striped(tmp_path, "ab").fill(range(COUNT))
    store = striped(tmp_path, "abc")

    assert main(["copy", *store.flags, *store.target_flags]) == 0

    moved = len(pages_in(tmp_path / "c"))
    out = capsys.readouterr().out
    assert f"{moved} pages copied, " in out
    assert f"removed from stripes where they do not belong: {moved} pages" in out


def test_a_stripe_that_is_back_gets_the_pages_that_others_took_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page that it still has is not copied, and leaves the others."""
    store = striped(tmp_path, "abc")
    store.fill(range(COUNT))
    owned = pages_in(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / "away")
    striped(tmp_path, "ab").fill(range(COUNT))  # as engines do while the config lacks it
    (tmp_path / "away").rename(tmp_path / "c")
    lost = min(files_in(tmp_path / "c"))
    lost.unlink()

    code, found = rebalanced(capsys, store)

    assert (0, 1, len(owned) - 1) == (code, found["copied_pages"], found["skipped_pages"])
    assert len(owned) == found["removed_pages"]
    assert owned == pages_in(tmp_path / "c")
    assert COUNT == len(files_in(tmp_path))
    assert loaded(store) == [True] * COUNT


def test_a_copy_is_kept_if_the_one_in_the_right_stripe_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    striped(tmp_path, "ab").fill(range(COUNT))
    store = striped(tmp_path, "abc")
    store.fill(range(COUNT))
    damaged = min(files_in(tmp_path / "c"))
    break_file(damaged)

    code, found = rebalanced(capsys, store)

    assert (1, {"corrupt": 1}) == (code, found["not_proved_pages"])
    assert damaged.name in pages_in(tmp_path / "a") | pages_in(tmp_path / "b")
    assert main(["verify", *store.flags, "--delete-wrong", "--yes"]) == 1
    assert (0, 1) == _counted(rebalanced(capsys, store))
    assert loaded(store) == [True] * COUNT


def test_a_damaged_page_is_not_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    space = striped(tmp_path, "ab").fill(range(COUNT))
    store = striped(tmp_path, "abc")
    hashes = [hash_of(n) for n in range(COUNT)]
    with store.open() as storage:
        places = storage.page_parts(space, hashes)
    damaged = hashes[places.index(("c",))]
    (path,) = tmp_path.rglob(f"spaces/*/??/{damaged}")
    break_file(path)

    code, found = rebalanced(capsys, store)

    assert (1, {"corrupt": 1}) == (code, found["not_proved_pages"])
    assert path.exists()
    assert pages_in(tmp_path / "c") == {
        one for one, names in zip(hashes, places, strict=True) if names == ("c",)
    } - {damaged}


def test_pages_without_frames_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with striped(tmp_path, "ab").open() as storage:
        storage.open_space(SPACE)
        storage.batch_set(SPACE, [hash_of(n) for n in range(9)], [page()] * 9)
    before = files_in(tmp_path)

    code, found = rebalanced(capsys, striped(tmp_path, "abc"))

    assert (1, [SPACE.id]) == (code, found["unframed_spaces"])
    assert before == files_in(tmp_path)


def test_only_selected_key_spaces_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, store = striped(tmp_path, "ab"), striped(tmp_path, "abc")
    two.fill(range(COUNT))
    two.fill(range(COUNT), DRAFT)

    assert rebalanced(capsys, store, "--pool", DRAFT.pool)[0] == 0

    assert loaded(store) != [True] * COUNT
    with store.open() as storage:
        (draft,) = (one for one in storage.spaces() if one.pool == DRAFT.pool)
    assert [*range(COUNT)] == store.numbers(draft)


@pytest.mark.parametrize("root", ["", "nvme"])
def test_a_stripe_without_the_free_space_is_named(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = tiered if root else striped
    shape(tmp_path, "ab").fill(range(COUNT))
    store = shape(tmp_path, "abc")
    config = store.config["tiers"][0]["config"] if root else store.config
    config["stripes"][2]["config"]["capacity_nbytes"] = "16KiB"
    before = files_in(tmp_path)

    assert main(["copy", *store.flags, *store.target_flags]) == 2

    name = f"{root}/c".lstrip("/")
    error = capsys.readouterr().err
    assert f"copy: the target has 16 KiB free in {name}, but the copy needs " in error
    assert before == files_in(tmp_path)
    code, planned = rebalanced(capsys, store, "--dry-run")
    assert (1, True) == (code, planned["lacking_nbytes"] > 0)
    assert rebalanced(capsys, store, "--evict")[0] == 1
    assert 0 < len(pages_in(tmp_path / "c"))


def test_a_stripe_that_is_not_mounted_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = striped(tmp_path, "abc")
    store.fill(range(COUNT))
    shutil.rmtree(tmp_path / "c")

    assert main(["copy", *store.flags, *store.target_flags]) == 2

    assert f"c: there is no store at {tmp_path}/c" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("call", ["batch_set", "batch_delete"])
def test_nothing_is_lost_whenever_it_is_interrupted(
    call: str,
    is_done: bool,  # noqa: FBT001
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupt each write in turn, before and after its effect, and go on until no page is left."""
    monkeypatch.setattr("hicache_storage.cli.operations.batches._MOST_PAGES", 4)
    striped(tmp_path, "ab").fill(range(COUNT))
    store = striped(tmp_path, "abc")
    before = pages_in(tmp_path)
    original: Callable[..., list[bool]] = getattr(FileStorage, call)

    def interrupted(storage: FileStorage, *arguments: Any) -> list[bool]:
        calls.append(call)
        if len(calls) != number:
            return original(storage, *arguments)
        if is_done:
            original(storage, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(FileStorage, call, interrupted)
    number, code = 0, 130
    while code == 130:
        number += 1
        calls, hits = list[str](), loaded(store)
        code = main(["copy", *store.flags, *store.target_flags])
        assert before == pages_in(tmp_path)
        assert all(now or not then for then, now in zip(hits, loaded(store), strict=True))
    assert (0, True) == (code, number > 2)
    assert loaded(store) == [True] * COUNT
    assert 0 == misplaced(capsys, store)
    assert COUNT == len(files_in(tmp_path))


def test_an_engine_loses_no_page_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that it gets once, it gets until the end, and each with its own bytes."""
    monkeypatch.setattr("hicache_storage.cli.operations.batches._MOST_PAGES", 1)
    striped(tmp_path, "ab").fill(range(COUNT))
    store = striped(tmp_path, "abc")
    lost, ended = list[int](), threading.Event()

    def engine() -> None:
        hits = [False] * COUNT
        while not ended.is_set():
            now = loaded(store)
            lost.extend(n for n in range(COUNT) if hits[n] and not now[n])
            hits = now

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        assert main(["copy", *store.flags, *store.target_flags]) == 0
    finally:
        ended.set()
        thread.join()

    assert not lost
    assert loaded(store) == [True] * COUNT


def test_pages_of_an_older_key_space_keep_their_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    framed = HookedStorage(Capabilities(alignment=4096))
    space, hashes = save(framed, range(COUNT)), [hash_of(n) for n in range(COUNT)]
    pages = [blank(space.stored_nbytes) for _ in hashes]
    framed.batch_get(space, hashes, pages)
    with striped(tmp_path, "ab").open() as storage:
        storage.open_space(space)
        storage.batch_set(space, hashes, pages)
    store = striped(tmp_path, "abc")

    code, found = rebalanced(capsys, store)

    assert (0, len(pages_in(tmp_path / "c"))) == (code, found["copied_pages"])
    assert 0 == misplaced(capsys, store)
    assert [*range(COUNT)] == store.numbers(space)
    with store.open() as storage:
        assert [space] == [*storage.spaces()]

"""`hicache copy`: every page that the target lacks is copied once, and verified on the way."""

from __future__ import annotations

import json
import os
import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, SPACE, CliStore, run_json, save
from composed_stores import file_member
from hicache_backends.memory import MemorySettings, MemoryStorage
from pages import hash_of, page, space
from s3_kit import config_of
from sealed_stores import key_files
from servers import free_port, wait_until
from stores import HookedStorage
from verb_processes import interrupted, slow_store, verb

from hicache_storage import HiCacheStorage, KeySpace, StorageUnavailable
from hicache_storage.cli import main
from hicache_storage.cli.operations.copying import copy
from hicache_storage.cli.operations.proofs import Proof
from hicache_storage.cli.operations.rate_limit import RateLimit
from hicache_storage.cli.progress import Meter
from hicache_storage.page import Page
from hicache_storage.storage import Capabilities

PAIRS = [("file", "redis"), ("redis", "s3"), ("s3", "hf3fs"), ("hf3fs", "file")]


def _copy(source: HiCacheStorage, target: HiCacheStorage, *spaces: KeySpace) -> Any:
    return copy(source, target, spaces, Meter(), RateLimit(None))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pages_go_from_any_store_to_any_store(
    first: str,
    second: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = store_of(first), store_of(second)
    source.fill(range(70))
    source.fill(range(5), DRAFT)

    code, copied = run_json(capsys, "copy", *source.flags, *target.target_flags)
    _, found = run_json(capsys, "verify", *target.flags)

    assert (0, 75, 0) == (code, copied["copied_pages"], copied["skipped_pages"])
    assert (75, []) == (found["proofs"]["ok"], found["findings"])


@pytest.mark.parametrize("backend", ["file", "hf3fs", "fsspec", "encrypted", "s3"])
def test_a_target_that_is_not_there_is_made(
    backend: str,
    file_store: CliStore,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file_store.fill(range(3))
    config: dict[str, Any] = {"path": str(tmp_path / "new")}
    if backend == "s3":
        config = config_of(request.getfixturevalue("s3_server"), bucket=f"new-{uuid.uuid4().hex}")
    elif backend != "file":
        config = {"url": f"file://{tmp_path}/new"} if backend != "hf3fs" else config
    if backend == "encrypted":
        config = {"backend": "fsspec", "config": config, **key_files(tmp_path, "a")}
    target = CliStore(backend, config)

    code, copied = run_json(capsys, "copy", *file_store.flags, *target.target_flags)

    assert (0, 3) == (code, copied["copied_pages"])


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_dry_run_counts_what_a_copy_then_copies(
    first: str,
    second: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = store_of(first), store_of(second)
    key_space = source.fill(range(9))
    source.fill(range(5), DRAFT)
    target.fill(range(4))
    argv = ["copy", *source.flags, *target.target_flags]

    code, planned = run_json(capsys, *argv, "--dry-run")

    assert (0, 10, 4) == (code, planned["copied_pages"], planned["skipped_pages"])
    assert [*range(4)] == target.numbers(key_space)
    _, copied = run_json(capsys, *argv)
    assert planned["copied_nbytes"] == copied["copied_nbytes"]


@pytest.mark.parametrize("backend", ["file", "hf3fs", "encrypted"])
def test_a_dry_run_makes_no_store(
    backend: str, file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(3))
    config: dict[str, Any] = {"path": str(tmp_path / "new")}
    if backend == "encrypted":
        config = {"backend": "file", "config": config, **key_files(tmp_path, "a")}
    target = CliStore(backend, config)

    assert main(["copy", *file_store.flags, *target.target_flags, "--dry-run"]) == 0

    assert "3 pages would be copied, " in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("backend", ["memory", "file"])
def test_a_dry_run_says_what_the_target_has_no_room_for(
    backend: str, file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key_space = file_store.fill(range(5))
    config: dict[str, Any] = {"capacity_nbytes": 10_000}
    if backend == "file":
        config["path"] = str(tmp_path / "new")
    target = CliStore(backend, config)

    code, planned = run_json(capsys, "copy", *file_store.flags, *target.target_flags, "--dry-run")

    assert (1, 5 * key_space.stored_nbytes - 10_000) == (code, planned["lacking_nbytes"])


def test_a_dry_run_finds_what_a_copy_would_refuse(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, full = store_of("file"), store_of("file")
    source.fill(range(2))
    full.fill(range(20))
    target = CliStore("file", {**full.config, "capacity_nbytes": 10_000})
    dead = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}", "timeout_s": 1})

    assert main(["copy", *source.flags, *target.target_flags, "--dry-run"]) == 2
    assert "would evict pages" in capsys.readouterr().err
    assert main(["copy", *source.flags, *dead.target_flags, "--dry-run"]) == 2


def test_a_dry_run_looks_at_a_tier(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(5))
    near, far = (file_member(name, tmp_path / name) for name in ("near", "far"))
    CliStore("file", near["config"]).fill(range(2))
    CliStore("file", far["config"]).fill(range(4))
    target = CliStore("tiered", {"tiers": [near, far]})
    argv = ["copy", *file_store.flags, *target.target_flags, "--dry-run"]

    for tier, copied in ((["--to-tier", "near"], 3), (["--to-tier", "far"], 1), ([], 1)):
        assert copied == run_json(capsys, *argv, *tier)[1]["copied_pages"]


def test_pages_that_are_there_are_skipped(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("redis")
    source.fill(range(10))
    target.fill(range(4))

    _, copied = run_json(capsys, "copy", *source.flags, *target.target_flags)

    assert (6, 4) == (copied["copied_pages"], copied["skipped_pages"])


def test_a_wrong_page_is_not_copied(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("redis")
    key_space = source.fill(range(5))
    source.break_page(2, key_space)

    code, copied = run_json(capsys, "copy", *source.flags, *target.target_flags)

    assert (1, {"corrupt": 1}) == (code, copied["not_proved_pages"])
    assert target.numbers(key_space) == [0, 1, 3, 4]


def test_an_aligned_target_gets_frames_of_its_own_size() -> None:
    source = MemoryStorage()
    key_space = save(source, range(3))
    target = HookedStorage(Capabilities(alignment=4096, enumerable=True))

    assert _copy(source, target, key_space).copied == 3

    (there,) = target.spaces()
    assert there.frame_nbytes == 4096
    payload = Page(bytearray(there.stored_nbytes))
    assert target.batch_get(there, [hash_of(1)], [payload]) == [True]
    assert payload.tobytes()[4096:] == page(SPACE.page_nbytes, seed=1).tobytes()


def test_a_copy_there_and_back_keeps_the_identity() -> None:
    source, back = MemoryStorage(), MemoryStorage()
    key_space = save(source, range(3))
    middle = HookedStorage(Capabilities(alignment=4096, enumerable=True))

    _copy(source, middle, key_space)
    assert _copy(middle, back, *middle.spaces()).is_whole

    assert [key_space] == list(back.spaces())
    first, second = (
        Page(bytearray(key_space.stored_nbytes)),
        Page(bytearray(key_space.stored_nbytes)),
    )
    source.batch_get(key_space, [hash_of(2)], [first])
    assert back.batch_get(key_space, [hash_of(2)], [second]) == [True]
    assert first.tobytes() == second.tobytes()


def test_pages_without_frames_are_not_copied() -> None:
    source = MemoryStorage()
    source.open_space(SPACE)
    source.batch_set(SPACE, [hash_of(0)], [page()])

    result = _copy(source, MemoryStorage(), SPACE)

    assert ([SPACE], False) == (result.unframed_spaces, result.is_whole)


def test_a_page_without_a_checksum_is_not_copied() -> None:
    source = MemoryStorage()
    key_space = save(source, range(2), checksum="none")

    assert _copy(source, MemoryStorage(), key_space).not_proved == {Proof.NO_CHECKSUM: 2}


def test_a_full_target_is_told(file_store: CliStore, capsys: pytest.CaptureFixture[str]) -> None:
    file_store.fill(range(5))
    target = CliStore("memory", {"capacity_nbytes": 10_000})

    assert main(["copy", *file_store.flags, *target.target_flags]) == 2
    assert "9.77 KiB free, but the copy needs 20.6 KiB: make room" in capsys.readouterr().err
    code, copied = run_json(capsys, "copy", *file_store.flags, *target.target_flags, "--evict")

    assert (1, 2, 3) == (code, copied["copied_pages"], copied["refused_pages"])


def test_a_store_that_fails_once_is_asked_again() -> None:
    source, target = MemoryStorage(), HookedStorage()
    key_space = save(source, range(3))
    failures = iter([StorageUnavailable("gone for a moment")])

    def hook(answer: Callable[[], Any]) -> Any:
        for error in failures:
            raise error
        return answer()

    target.hooks["batch_set"] = hook

    assert _copy(source, target, key_space).copied == 3


def test_a_target_that_is_down_is_one_line(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    target = CliStore("redis", {"url": f"redis://127.0.0.1:{free_port()}", "timeout_s": 1})

    assert main(["copy", *file_store.flags, *target.target_flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_only_the_selected_key_spaces_are_copied() -> None:
    source = MemoryStorage()
    chosen = save(source, range(2))
    save(source, range(3), space(tenant="other"))

    assert _copy(source, MemoryStorage(), chosen).copied == 2


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--to-backend, --to-config or --to-store is required"),
        (["--to-backend", "memroy"], "did you mean 'memory'?"),
        (["--to-config", "x.json", "--to-backend", "memory"], "leave out --to-backend"),
        (["--to-backend", "memory", "--bandwidth-limit", "fast"], "not 'fast'"),
    ],
)
def test_a_wrong_target_is_wrong_use(
    flags: list[str], reason: str, file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.open().close()

    assert main(["copy", *file_store.flags, *flags]) == 2
    assert reason in capsys.readouterr().err


def test_a_killed_copy_goes_on_where_it_ended(
    store_of: Callable[[str], CliStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = store_of("file"), store_of("redis")
    key_space = source.fill(range(200))
    slow = slow_store(source, tmp_path)
    with verb(tmp_path, "copy", *slow.flags, *target.target_flags) as process:
        wait_until(lambda: bool(target.numbers(key_space)))
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    before = len(target.numbers(key_space))

    code, copied = run_json(capsys, "copy", *source.flags, *target.target_flags)

    # The server may carry out a write of the killed process after the count.
    assert (0, 200) == (code, copied["skipped_pages"] + copied["copied_pages"])
    assert before <= copied["skipped_pages"] < 200
    assert target.numbers(key_space) == [*range(200)]


def test_ctrl_c_ends_it_cleanly_while_it_waits_for_its_limit_and_prints_its_figures(
    store_of: Callable[[str], CliStore], tmp_path: Path
) -> None:
    source, target = store_of("file"), store_of("redis")
    key_space = source.fill(range(200))
    flags = [*slow_store(source, tmp_path).flags, *target.target_flags]

    code, output, errors = interrupted(
        tmp_path, "copy", "--json", "--bandwidth-limit", "1KB", *flags
    )

    document = json.loads(output)
    assert (130, "hicache: interrupted\n", False) == (code, errors, document["is_done"])
    assert len(target.numbers(key_space)) == document["copied_pages"]


def test_a_target_that_takes_nothing_ends_the_copy() -> None:
    source, target = MemoryStorage(), MemoryStorage(MemorySettings(capacity_nbytes=200))
    key_space = save(source, range(3000), space(page_nbytes=64))

    result = _copy(source, target, key_space)

    assert (True, 1) == (result.is_given_up, result.copied)
    assert 1024 <= result.refused < 2999


@pytest.mark.parametrize("is_link", [False, True])
def test_a_copy_of_a_store_onto_itself_is_refused(
    is_link: bool,  # noqa: FBT001
    file_store: CliStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file_store.fill(range(2))
    link = tmp_path / "link"
    link.symlink_to(file_store.config["path"])
    target = CliStore("file", {"path": str(link)}) if is_link else file_store

    assert main(["copy", *file_store.flags, *target.target_flags]) == 2
    assert "source and target are the same store" in capsys.readouterr().err


def test_one_store_below_another_is_known_by_its_place(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, keys = tmp_path / "link", key_files(tmp_path)
    link.symlink_to(file_store.config["path"])
    source, target = (
        CliStore("encrypted", {"backend": "file", "config": {"path": str(path)}, **keys})
        for path in (file_store.config["path"], link)
    )

    assert main(["copy", *source.flags, *target.target_flags]) == 2
    assert "source and target are the same store" in capsys.readouterr().err


def test_a_page_of_a_wrong_length_is_counted(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(3))
    path = next(Path(file_store.config["path"]).glob("spaces/*/??/*"))
    os.truncate(path, 10)

    code, copied = run_json(capsys, "copy", "--to-backend", "memory", *file_store.flags)

    assert (1, {"wrong_size": 1}) == (code, copied["not_proved_pages"])


def test_a_target_beyond_the_capacity_of_its_config_is_not_opened(
    store_of: Callable[[str], CliStore], capsys: pytest.CaptureFixture[str]
) -> None:
    source, full = store_of("file"), store_of("file")
    source.fill(range(2))
    key_space = full.fill(range(20))
    target = CliStore("file", {**full.config, "capacity_nbytes": 10_000})

    assert main(["copy", *source.flags, *target.target_flags]) == 2
    assert "would evict pages" in capsys.readouterr().err
    assert [*range(20)] == full.numbers(key_space)

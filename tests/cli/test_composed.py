"""The verbs on stores that consist of others: each tier and stripe is shown, and can be chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_stores import DRAFT, SPACE, CliStore, run_json, save
from composed_stores import file_member, memory_member
from pages import hash_of
from sealed_stores import key_files

from hicache_storage.cli import main

SPACE_AS_STORED = replace(SPACE, frame_nbytes=128)
_SMALL = ("--page-bytes", "4KiB", "--pages", "4")


def store_of_files(root: Path, **nvme: Any) -> CliStore:
    """Return `tiered` over `striped` over files, and files. `nvme` are fields of each stripe."""
    stripes = [file_member(name, root / name, **nvme) for name in "ab"]
    tiers = [
        {"name": "nvme", "backend": "striped", "config": {"stripes": stripes}},
        file_member("bucket", root / "bucket"),
    ]
    return CliStore("tiered", {"tiers": tiers})


@pytest.fixture
def tiered(tmp_path: Path) -> CliStore:
    return store_of_files(tmp_path)


def striped(root: Path, names: str) -> CliStore:
    return CliStore("striped", {"stripes": [file_member(name, root / name) for name in names]})


def pages_in(capsys: pytest.CaptureFixture[str], store: CliStore, *flags: str) -> dict[str, int]:
    """Return how many pages each tier has in the only key space."""
    capsys.readouterr()
    code, found = run_json(capsys, "ls", *store.flags, *flags)
    assert code == 0
    (space,) = found["spaces"]
    return {name: tier["pages"] for name, tier in space["tiers"].items()}


def files_in(root: Path) -> dict[Path, bytes]:
    """Return the pages of all stores below a directory."""
    return {path: path.read_bytes() for path in root.glob("*/spaces/*/??/*")}


def exchange(root: Path, one: str, other: str) -> None:
    """Exchange the pages of two stripes, but not their labels."""
    moved = root / "moved"
    for space in [path.name for path in (root / one / "spaces").iterdir()]:
        places = [root / name / "spaces" / space for name in (one, other)]
        if all(any(place.glob("??")) for place in places):
            places[0].rename(moved)
            places[1].rename(places[0])
            moved.rename(places[1])


def break_file(root: Path, number: int) -> None:
    """Flip a bit of a page in a store of files."""
    (path,) = root.rglob(hash_of(number))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class TestLs:
    def test_each_tier_has_a_column(
        self, tiered: CliStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(5))

        assert main(["ls", *tiered.flags]) == 0

        out = capsys.readouterr().out
        assert "nvme 5" in out
        assert "bucket 5" in out

    def test_a_tier_of_stripes_shows_its_stripes(
        self, tiered: CliStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(20))

        found = pages_in(capsys, tiered, "--tier", "nvme")

        assert ["a", "b"] == list(found)
        assert sum(found.values()) == 20

    def test_many_stripes_share_a_column_in_80_columns(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = striped(tmp_path, "abcdefgh")
        store.fill(range(40))

        assert main(["ls", *store.flags]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 10
        assert max(map(len, lines)) <= 80

    def test_a_plain_store_has_no_tiers(
        self, file_store: CliStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file_store.fill(range(1))

        _, found = run_json(capsys, "ls", *file_store.flags)

        assert "tiers" not in found["spaces"][0]

    @pytest.mark.parametrize(
        ("verb", "name"), [("ls", "tier 'nvme': stripe 'b'"), ("stats", "nvme/b")]
    )
    def test_a_stripe_that_is_gone_is_not_an_empty_one(
        self,
        tiered: CliStore,
        verb: str,
        name: str,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        tiered.fill(range(5))
        shutil.rmtree(tmp_path / "b")

        assert main([verb, *tiered.flags]) == 2

        advice = f"mount it; if its disk is new, make the directory {tmp_path}/b/spaces there"
        error = capsys.readouterr().err
        assert error.endswith(f"{name}: there is no store at {tmp_path}/b: {advice}\n")

    @pytest.mark.parametrize("verb", ["gc", "rm", "verify", "copy"])
    def test_a_change_elsewhere_does_not_make_it_anew(
        self, tiered: CliStore, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Its disk may not be mounted, and the root disk would fill up."""
        space = tiered.fill(range(5))
        break_file(tmp_path / "bucket", 2)
        shutil.rmtree(tmp_path / "b")
        argv = {
            "gc": ["--model", space.model, "--yes", "--tier", "bucket"],
            "rm": [space.id, hash_of(0), "--yes", "--tier", "bucket"],
            "verify": ["--delete-wrong", "--yes", "--tier", "bucket"],
            "copy": ["--tier", "bucket", *tiered.target_flags, "--to-tier", "nvme/a"],
        }[verb]

        assert main([verb, *tiered.flags, *argv]) == 2
        assert f"nvme/b: there is no store at {tmp_path}/b: mount it" in capsys.readouterr().err
        assert not (tmp_path / "b").exists()

    def test_a_copy_to_it_works_when_its_disk_is_said_to_be_new(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(20))
        lost = pages_in(capsys, tiered, "--tier", "nvme")["b"]
        shutil.rmtree(tmp_path / "b")
        argv = ["--tier", "bucket", *tiered.target_flags, "--to-tier", "nvme"]
        assert main(["copy", *tiered.flags, *argv]) == 2
        assert not (tmp_path / "b").exists()

        (tmp_path / "b" / "spaces").mkdir(parents=True)

        assert main(["copy", *tiered.flags, *argv]) == 0, capsys.readouterr()
        assert lost == pages_in(capsys, tiered, "--tier", "nvme")["b"] > 0

    @pytest.mark.parametrize("tier", ["bucket", "nvme/a"])
    def test_the_stores_beside_it_are_listed(
        self, tiered: CliStore, tmp_path: Path, tier: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(20))
        shutil.rmtree(tmp_path / "b")

        assert main(["ls", *tiered.flags, "--tier", tier]) == 0
        assert "1 key space" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "verb", ["ls", "stats", "verify", "gc", "inspect", "rm", "copy", "diff"]
    )
    def test_a_wrong_name_is_answered_with_all_names(
        self, tiered: CliStore, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(1))
        more = {
            "gc": ["--empty"],
            "inspect": [space.id],
            "rm": [space.id, hash_of(0)],
            "copy": CliStore("file", {"path": str(tmp_path / "target")}).target_flags,
            "diff": ["--to-backend", "memory"],
        }.get(verb, [])

        assert main([verb, *tiered.flags, "--tier", "disk", *more]) == 2
        assert "choose one of nvme, nvme/a, nvme/b, bucket" in capsys.readouterr().err

    @pytest.mark.parametrize("verb", ["ls", "verify", "doctor"])
    def test_disks_that_are_exchanged_are_named(
        self, tiered: CliStore, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(20))
        for old, new in (("a", "away"), ("b", "a"), ("away", "b")):
            (tmp_path / old).rename(tmp_path / new)

        assert main([verb, *tiered.flags, *(_SMALL if verb == "doctor" else ())]) == 0

        out = " ".join(capsys.readouterr().out.split())
        assert "nvme/a: label" in out
        assert "there is the store 'b'" in out
        with tiered.open() as storage:
            hits = storage.parts()["nvme"].batch_exists(
                next(storage.spaces()), [hash_of(number) for number in range(20)]
            )
        assert [True] * 20 == hits


class TestVerify:
    def test_a_damaged_copy_is_found_in_its_tier(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(4))
        break_file(tmp_path / "bucket", 2)

        code, found = run_json(capsys, "verify", *tiered.flags, "--tier", "bucket")

        assert code == 1
        assert [hash_of(2)] == [one["hash"] for one in found["findings"]]

    def test_what_engines_get_is_right_if_one_copy_is(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(4))
        break_file(tmp_path / "bucket", 2)

        assert main(["verify", *tiered.flags]) == 0
        assert "--tier NAME checks the copies in one of: nvme, nvme/a" in capsys.readouterr().out

    def test_a_wrong_copy_is_deleted_from_its_tier_alone(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(4))
        break_file(tmp_path / "bucket", 2)
        delete = ("--tier", "bucket", "--delete-wrong", "--yes")

        assert main(["verify", *tiered.flags, *delete]) == 1

        assert {"nvme": 4, "bucket": 3} == pages_in(capsys, tiered)

    @pytest.mark.parametrize("flags", [(), ("--delete-wrong", "--yes")])
    def test_pages_on_a_wrong_stripe_are_counted_and_stay(
        self, tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        striped(tmp_path, "ab").fill(range(60))
        store = striped(tmp_path, "abc")
        found = len(store.numbers(SPACE_AS_STORED))
        before = files_in(tmp_path)

        code, document = run_json(capsys, "verify", *store.flags, *flags)

        assert (1, 0, []) == (code, document["deleted"], document["findings"])
        assert {"ok": found, "gone": 0}.items() <= document["proofs"].items()
        assert found < 60 == found + sum(document["misplaced"].values())
        assert {"a", "b"} == document["misplaced"].keys()
        assert main(["verify", *store.flags]) == 1
        a, b = (document["misplaced"][name] for name in "ab")
        assert f"misplaced: {a} pages in a, {b} pages in b: " in capsys.readouterr().out
        assert before == files_in(tmp_path)

    def test_labels_are_in_the_json(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = striped(tmp_path, "ab")
        store.fill(range(9))
        assert [] == run_json(capsys, "verify", *store.flags)[1]["labels"]
        for source, target in (("a", "moved"), ("b", "a"), ("moved", "b")):
            (tmp_path / source).rename(tmp_path / target)

        code, document = run_json(capsys, "verify", *store.flags)

        assert (0, {}) == (code, document["misplaced"])
        assert document["labels"][0].startswith("a: label: there is the store 'b': ")

    def test_a_copy_that_was_left_behind_is_misplaced_although_its_page_is_found(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        striped(tmp_path, "ab").fill(range(60))
        store = striped(tmp_path, "abc")
        store.fill(range(60))

        code, document = run_json(capsys, "verify", *store.flags)

        assert (1, 60) == (code, document["proofs"]["ok"])
        assert 0 < sum(document["misplaced"].values()) < 60

    def test_the_stripes_of_a_tier_are_looked_through(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_of_files(tmp_path).fill(range(60))
        exchange(tmp_path, "a", "b")

        for flags, names in (((), {"nvme/a", "nvme/b"}), (("--tier", "nvme"), {"a", "b"})):
            code, document = run_json(capsys, "verify", *store_of_files(tmp_path).flags, *flags)
            assert (1, names) == (code, document["misplaced"].keys())
            assert 60 == sum(document["misplaced"].values())
        assert 60 == run_json(capsys, "verify", *store_of_files(tmp_path).flags)[1]["proofs"]["ok"]

    @pytest.mark.parametrize("tier", ["nvme/a", "bucket"])
    def test_a_stripe_alone_has_no_misplaced_pages(
        self, tmp_path: Path, tier: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store_of_files(tmp_path).fill(range(60))
        exchange(tmp_path, "a", "b")

        code, document = run_json(capsys, "verify", *store_of_files(tmp_path).flags, "--tier", tier)

        assert (0, {}) == (code, document["misplaced"])

    def test_sealed_pages_are_placed_by_their_sealed_names(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        keys = key_files(tmp_path)
        two, three = (
            CliStore(
                "encrypted",
                {"backend": "striped", "config": striped(tmp_path, names).config, **keys},
            )
            for names in ("ab", "abc")
        )
        space = two.fill(range(60))
        found = len(three.numbers(space))

        code, document = run_json(capsys, "verify", *three.flags)

        assert (1, found) == (code, document["proofs"]["ok"])
        assert found < 60 == found + sum(document["misplaced"].values())


class TestGcAndInspect:
    def test_a_key_space_is_removed_from_one_tier(
        self, tiered: CliStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(4))

        assert main(["gc", *tiered.flags, "--tier", "nvme", "--pool", SPACE.pool, "--yes"]) == 0

        assert {"nvme": 0, "bucket": 4} == pages_in(capsys, tiered)

    def test_a_page_is_looked_at_in_one_tier(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(1))
        break_file(tmp_path / "bucket", 0)

        code, found = run_json(
            capsys, "inspect", space.id, hash_of(0), *tiered.flags, "--tier", "bucket"
        )

        assert (1, "corrupt") == (code, found["proof"])

    def test_a_key_space_that_one_stripe_cannot_read_is_kept_in_the_others(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(20))
        (manifest,) = (tmp_path / "a").rglob(f"{space.id}/manifest.json")
        manifest.write_text("damaged")

        assert main(["gc", *tiered.flags, "--unreadable", "--yes"]) == 1

        assert "other tiers can read it: use --tier" in capsys.readouterr().out
        with tiered.open() as storage:
            assert len([*storage.parts()["bucket"].scan(space)]) == 20

    def test_a_key_space_is_kept_everywhere_if_one_store_could_not_look(
        self,
        tmp_path: Path,
        unread: Callable[[Path], None],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        store = striped(tmp_path, "ab")
        space = store.fill(range(20))
        damaged, unknown = sorted(tmp_path.rglob(f"{space.id}/manifest.json"))
        damaged.write_text("damaged")
        unread(unknown)
        argv = ("gc", *store.flags, "--unreadable", "--space", space.id, "--yes")

        code, found = run_json(capsys, *argv)

        assert (1, 0, [space.id]) == (code, found["removed_pages"], found["kept"])
        assert "stripe 'b': its manifest cannot be read: Input/output" in found["reasons"][space.id]
        assert len([*tmp_path.rglob(f"{space.id}/??/*")]) == 20

    def test_a_key_space_that_one_stripe_cannot_read_can_be_named(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(20))
        (manifest,) = (tmp_path / "a").rglob(f"{space.id}/manifest.json")
        manifest.write_text("damaged")

        code, found = run_json(capsys, "inspect", space.id[:8], *tiered.flags)

        assert (0, 20) == (code, found["pages"])

    def test_a_key_space_is_removed_where_it_cannot_be_read(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(20))
        (manifest,) = (tmp_path / "a").rglob(f"{space.id}/manifest.json")
        manifest.write_text("damaged")
        chosen = ("--tier", "nvme/a", "--unreadable", "--space", space.id)

        assert main(["gc", *tiered.flags, *chosen, "--yes"]) == 0

        found = pages_in(capsys, tiered)
        assert found["bucket"] == 20 > found["nvme"]


class TestCopy:
    def test_a_tier_is_filled_from_another_one(
        self, tiered: CliStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        space = tiered.fill(range(4))
        with tiered.open() as storage:
            storage.parts()["nvme"].clear(space)

        tiers = ("--tier", "bucket", "--to-tier", "nvme")
        assert main(["copy", *tiered.flags, *tiered.target_flags, *tiers]) == 0

        assert {"nvme": 4, "bucket": 4} == pages_in(capsys, tiered)

    @pytest.mark.parametrize("tiers", [(), ("--tier", "nvme", "--to-tier", "nvme")])
    def test_stripes_with_all_pages_in_their_places_stay_as_they_are(
        self,
        tiered: CliStore,
        tiers: tuple[str, ...],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        tiered.fill(range(20))
        before = files_in(tmp_path)

        code, found = run_json(capsys, "copy", *tiered.flags, *tiered.target_flags, *tiers)

        assert (0, 0, 0) == (code, found["copied_pages"], found["removed_pages"])
        assert before == files_in(tmp_path)

    @pytest.mark.parametrize("tier", ["bucket", "nvme/a"])
    def test_a_tier_without_stripes_is_not_copied_to_itself(
        self, tiered: CliStore, tier: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(1))
        tiers = ("--tier", tier, "--to-tier", tier)

        assert main(["copy", *tiered.flags, *tiered.target_flags, *tiers]) == 2
        assert "the same store" in capsys.readouterr().err

    def test_a_wrong_target_changes_nothing(
        self, tiered: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(1))
        source = CliStore("file", {"path": str(tmp_path / "bucket")})

        assert main(["copy", *source.flags, *tiered.target_flags, "--to-tier", "disk"]) == 2
        assert "--to-tier: there is no tier or stripe 'disk'" in capsys.readouterr().err

    def test_pages_move_to_a_stripe_that_was_added(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        two, three = striped(tmp_path, "ab"), striped(tmp_path, "abc")
        space = two.fill(range(60))
        with three.open() as storage:
            hits = storage.batch_exists(space, [hash_of(n) for n in range(60)])
        assert 0 < hits.count(False) < 40

        assert main(["copy", *two.flags, *three.target_flags]) == 0

        assert f"{hits.count(False)} pages copied" in capsys.readouterr().out
        assert [*range(60)] == three.numbers(space)

    def test_a_stripe_that_is_above_its_capacity_is_not_opened_for_writing(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The sum of the capacities is large enough, but this stripe would evict pages."""
        store = striped(tmp_path, "ab")
        store.fill(range(40))
        config = json.loads(json.dumps(store.config))
        config["stripes"][0]["config"]["capacity_nbytes"] = "32KiB"
        source = CliStore("file", {"path": str(tmp_path / "source")})
        source.fill(range(1), DRAFT)

        assert main(["copy", *source.flags, *CliStore("striped", config).target_flags]) == 2

        err = capsys.readouterr().err
        assert "striped: a holds " in err
        assert "capacity_nbytes is 32 KiB" in err


class TestDoctor:
    @pytest.fixture
    def checked(
        self, capsys: pytest.CaptureFixture[str]
    ) -> Callable[[CliStore], tuple[int, dict[str, Any]]]:
        def check(store: CliStore) -> tuple[int, dict[str, Any]]:
            code, found = run_json(capsys, "doctor", *_SMALL, *store.flags)
            return code, {one["topic"]: one for one in found["checks"]}

        return check

    def test_each_store_has_lines_of_its_own(self, tiered: CliStore, checked: Any) -> None:
        tiered.fill(range(1))

        code, found = checked(tiered)

        assert code == 0, found
        for name in ("nvme/a", "nvme/b", "bucket"):
            assert {f"{name}: open", f"{name}: mount", f"{name}: free space"} <= found.keys()
            assert found[f"{name}: speed"]["fact"].startswith("write ")

    def test_the_trial_leaves_nothing_in_any_tier(
        self, tiered: CliStore, checked: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        tiered.fill(range(4))

        checked(tiered)

        assert {"nvme": 4, "bucket": 4} == pages_in(capsys, tiered)

    def test_a_store_that_is_gone_is_a_problem_and_is_not_made(
        self, tiered: CliStore, tmp_path: Path, checked: Any
    ) -> None:
        tiered.fill(range(4))
        shutil.rmtree(tmp_path / "b")

        code, found = checked(tiered)

        assert code == 1
        assert found["nvme/b: open"]["status"] == "problem"
        assert found["nvme/b: open"]["advice"].startswith("mount it")
        assert found["bucket: key spaces"]["fact"] == "1"
        assert not (tmp_path / "b").exists()

    def test_a_server_that_is_down_is_a_problem_of_its_tier(
        self, tmp_path: Path, checked: Any
    ) -> None:
        redis = {"name": "rack", "backend": "redis", "config": {"url": "redis://127.0.0.1:1"}}
        nvme = file_member("nvme", tmp_path / "nvme")
        tiers = [nvme, redis]
        CliStore("file", nvme["config"]).fill(range(1))

        code, found = checked(CliStore("tiered", {"tiers": tiers}))

        assert (1, "problem") == (code, found["rack: open"]["status"])
        assert found["nvme: open"]["status"] == "ok"

    def test_a_full_stripe_is_named_and_nothing_is_written(
        self, tmp_path: Path, checked: Any
    ) -> None:
        store = store_of_files(tmp_path, capacity_nbytes="64KiB")
        store.fill(range(60))

        code, found = checked(store)

        assert code == 0, found
        assert "not tried: nvme/" in found["write"]["fact"]

    def test_a_stripe_above_its_capacity_is_a_problem(self, tmp_path: Path, checked: Any) -> None:
        store_of_files(tmp_path).fill(range(60))

        code, found = checked(store_of_files(tmp_path, capacity_nbytes="32KiB"))

        assert (1, "problem") == (code, found["nvme/a: capacity"]["status"])

    def test_a_damaged_copy_is_found_in_its_tier(self, tmp_path: Path, checked: Any) -> None:
        store = store_of_files(tmp_path, capacity_nbytes="64KiB")
        store.fill(range(60))  # full, so that doctor reads what is there
        for number in range(60):
            break_file(tmp_path / "bucket", number)

        code, found = checked(store)

        assert (1, "problem") == (code, found["bucket: read"]["status"])

    def test_a_composition_that_is_not_there_is_made(self, tiered: CliStore, checked: Any) -> None:
        code, found = checked(tiered)

        assert (0, "note") == (code, found["open"]["status"])
        assert found["bucket: speed"]["status"] == "ok"


def test_encrypted_over_a_composition_reaches_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = store_of_files(tmp_path)
    keys = key_files(tmp_path)
    store = CliStore("encrypted", {"backend": "tiered", "config": inner.config, **keys})
    store.fill(range(4))

    assert main(["verify", *store.flags, "--tier", "nvme"]) == 0
    assert "4 ok" in capsys.readouterr().out
    assert {"nvme": 4, "bucket": 4} == pages_in(capsys, store)


def test_encrypted_below_a_composition_is_a_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sealed = {"backend": "file", "config": {"path": str(tmp_path / "b")}, **key_files(tmp_path)}
    below = {"name": "far", "backend": "encrypted", "config": sealed}
    store = CliStore("tiered", {"tiers": [file_member("near", tmp_path / "a"), below]})
    store.fill(range(4))

    assert {"near": 4, "far": 4} == pages_in(capsys, store)
    _, found = run_json(capsys, "doctor", *_SMALL, *store.flags)
    assert "far: free space" in {one["topic"] for one in found["checks"]}


def test_a_tier_in_memory_is_empty_for_a_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pages in a process's own memory are not those of the engine."""
    tiers = [memory_member("ram"), file_member("nvme", tmp_path / "nvme")]
    store = CliStore("tiered", {"tiers": tiers})
    with store.open() as storage:
        save(storage, range(4))

    assert {"ram": 0, "nvme": 4} == pages_in(capsys, store)

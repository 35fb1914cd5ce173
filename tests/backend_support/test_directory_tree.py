"""The directory tree that backends of files share."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import space

from hicache_storage import ConfigError, KeySpace, StorageUnavailable
from hicache_storage.backend_support.directory_tree import DirectoryTree
from hicache_storage.storage import UnreadableKind

SPACE = space()


class Tree(DirectoryTree):
    """The tree of a backend without files of its own."""

    backend = "acme"
    own_names = re.compile("index")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree.create(str(tmp_path / "a" / "root"))


@pytest.fixture(params=[None, "temp"], ids=["beside-the-manifest", "elsewhere"])
def temp_path(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    return request.param and str(tmp_path / request.param)


def directory(tree: Tree, space_id: str = SPACE.id) -> Path:
    return Path(tree.space_dir(space_id))


def manifest(tree: Tree) -> Path:
    return directory(tree) / "manifest.json"


def listed(tree: Tree) -> list[KeySpace]:
    return list(tree.key_spaces(skip_unreadable=False))


class TestCreate:
    def test_its_directories_are_there(self, tree: Tree, tmp_path: Path) -> None:
        assert {"spaces", "writers"} == {path.name for path in (tmp_path / "a" / "root").iterdir()}

    def test_a_tree_that_is_there_is_left_as_it_is(self, tree: Tree) -> None:
        tree.make_space(SPACE)

        assert [SPACE] == listed(Tree.create(tree.root))

    @pytest.mark.parametrize("name", ["", "spaces", "writers"])
    def test_a_file_in_the_place_of_a_directory_is_named(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / "root" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        with pytest.raises(ConfigError, match=f"acme: path: {path} cannot be used as a directory"):
            Tree.create(str(tmp_path / "root"))

    def test_the_root_may_be_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "target").mkdir()
        (tmp_path / "root").symlink_to(tmp_path / "target")
        Tree.create(str(tmp_path / "root")).make_space(SPACE)

        assert (tmp_path / "target" / "spaces" / SPACE.id / "manifest.json").is_file()

    def test_a_root_that_is_gone_is_not_restored(self, tree: Tree, tmp_path: Path) -> None:
        (tmp_path / "a").rename(tmp_path / "b")
        with pytest.raises(FileNotFoundError):
            tree.restore()
        with pytest.raises(StorageUnavailable, match="spaces is gone"):
            tree.check_exists()
        with pytest.raises(StorageUnavailable, match="spaces is gone"):
            listed(tree)

    def test_a_root_that_cannot_be_reached_is_not_gone(self, tree: Tree) -> None:
        Path(tree.spaces).rmdir()
        Path(tree.spaces).symlink_to("spaces")

        with pytest.raises(StorageUnavailable, match="spaces cannot be reached: Too many levels"):
            tree.check_exists()


class TestManifests:
    def test_a_key_space_is_made_once(self, tree: Tree, temp_path: str | None) -> None:
        assert tree.make_space(SPACE, temp_path)
        assert not tree.make_space(SPACE, temp_path)
        assert SPACE == tree.key_space(SPACE.id)
        assert [manifest(tree)] == list(directory(tree).iterdir())

    def test_key_spaces_are_listed_in_a_fixed_order(self, tree: Tree) -> None:
        spaces = [space(model=f"m{number}") for number in range(8)]
        for key_space in spaces:
            tree.make_space(key_space)

        assert sorted(spaces, key=lambda each: each.id) == listed(tree)

    @pytest.mark.parametrize("indent", [None, 1])
    def test_the_manifest_of_an_earlier_release_is_read(
        self, tree: Tree, indent: int | None
    ) -> None:
        directory(tree).mkdir()
        manifest(tree).write_text(json.dumps(SPACE.manifest(), indent=indent))

        assert not tree.make_space(SPACE)
        assert [SPACE] == listed(tree)

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
    def test_a_damaged_manifest_is_none_and_is_replaced(
        self, tree: Tree, temp_path: str | None, content: bytes
    ) -> None:
        directory(tree).mkdir()
        manifest(tree).write_bytes(content)

        assert tree.key_space(SPACE.id) is None
        assert tree.make_space(SPACE, temp_path)
        assert [SPACE] == listed(tree)

    def test_a_manifest_in_another_directory_is_none(self, tree: Tree) -> None:
        tree.make_space(SPACE)
        directory(tree).rename(directory(tree, "0" * 32))

        assert [] == listed(tree)

    @pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
    def test_another_kind_of_file_is_no_manifest(
        self, tree: Tree, tmp_path: Path, kind: str
    ) -> None:
        tree.make_space(SPACE)
        manifest(tree).rename(tmp_path / "target")
        if kind == "link":
            manifest(tree).symlink_to(tmp_path / "target")
        elif kind == "directory":
            manifest(tree).mkdir()
        else:
            os.mkfifo(manifest(tree))

        assert tree.key_space(SPACE.id) is None
        (told,) = tree.unreadable_spaces()
        assert (UnreadableKind.DAMAGED, "its manifest is not a regular file") == (
            told.kind,
            told.reason,
        )

    def test_a_manifest_that_was_not_read_is_an_error_or_left_out_and_told(
        self, tree: Tree, unread: Callable[[Path], None]
    ) -> None:
        tree.make_space(SPACE)
        unread(manifest(tree))

        assert [] == list(tree.key_spaces(skip_unreadable=True))
        with pytest.raises(OSError, match="Input/output error"):
            listed(tree)
        (told,) = tree.unreadable_spaces()
        assert UnreadableKind.NOT_READ is told.kind
        assert "its manifest cannot be read: Input/output error" == told.reason

    def test_a_failed_write_leaves_no_temporary_file(
        self, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def failing(_: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="Input/output error"):
            tree.make_space(SPACE, str(tmp_path / "temp"))

        assert not (tmp_path / "temp").exists()
        assert [] == listed(tree)


class TestForeignFiles:
    def test_a_link_to_a_directory_is_no_key_space(
        self, tree: Tree, tmp_path: Path, temp_path: str | None
    ) -> None:
        tree.make_space(SPACE)
        directory(tree).rename(tmp_path / "target")
        directory(tree).symlink_to(tmp_path / "target")

        assert [] == listed(tree)
        with pytest.raises(StorageUnavailable, match="symbolic link"):
            tree.make_space(SPACE, temp_path)

    def test_entries_of_another_name_are_not_listed(self, tree: Tree) -> None:
        for name in ("notes", SPACE.id.upper(), SPACE.id + "0"):
            directory(tree, name).mkdir()
        directory(tree).mkdir()

        assert [SPACE.id] == [entry.name for entry in tree.space_entries()]

    def test_a_missing_directory_has_no_entries(self, tree: Tree) -> None:
        assert [] == tree.entries(f"{tree.root}/missing", re.compile(".*"))

"""The rights in docs/security.md are sufficient, and no more than a tenant's own pages need."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_stores import CliStore
from hf3fs_redis import HASHES, SPACE, hits, opened, stored
from hicache_backends.hf3fs import Hf3fsStorage
from pages import blank, hash_of, page
from redis_servers import client_of_one
from servers import ROOT, RedisServer

from hicache_storage import open_storage
from hicache_storage.cli import main
from hicache_storage.errors import StorageUnavailable
from hicache_storage.storage import HiCacheStorage

GUIDE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
RIGHTS: dict[str, str] = {}
for user, rights in re.findall(r"^ACL SETUSER (\S+) (.*)$", GUIDE, re.MULTILINE):
    RIGHTS[user] = f"{RIGHTS.get(user, '')} {rights}".strip()
TENANTS = {name: rights for name, rights in RIGHTS.items() if name != "default"}
PASSWORD = "open-sesame"  # noqa: S105


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a server with the users of the guide."""
    with RedisServer(tmp_path / "server") as running:
        with client_of_one(running) as admin:
            for name, rights in TENANTS.items():
                plain = rights.replace("PASSWORD", PASSWORD)
                admin.execute_command("ACL", "SETUSER", name, *plain.split())
        yield running


def as_tenant(server: RedisServer, user: str, prefix: str) -> HiCacheStorage:
    """Open the store of `prefix` as a user of the guide."""
    own = {"username": user, "password": PASSWORD, "prefix": prefix}
    return open_storage("redis", {"url": server.url, **own})


def rights_of_others(server: RedisServer, user: str, *command: str) -> str:
    """Return the server's answer to a command of `user` about a key of another user."""
    with client_of_one(server) as client:
        client.execute_command("AUTH", user, PASSWORD)
        with pytest.raises(Exception, match=r".") as caught:
            client.execute_command(*command)
        return str(caught.value)


ACL_OF_THE_PAGE = re.compile(r"^`~hicache:\* ([^`]+)`$", re.MULTILINE)
LEFT_OUT = {"+scan", "+hgetall", "+client|kill"}
"""What the table of the guide takes from tenants, apart from the commands of clusters."""


def commands_of(rights: str) -> set[str]:
    return {word for word in rights.split() if word.startswith("+")}


class TestRedis:
    def test_pages_and_manifests_have_one_list_of_commands(self) -> None:
        page_text = (ROOT / "docs/backends/redis.md").read_text(encoding="utf-8")
        (listed,) = ACL_OF_THE_PAGE.findall(page_text)
        deployed = (ROOT / "deploy/redis/users.acl").read_text(encoding="utf-8").splitlines()[-1]

        assert commands_of(listed) == commands_of(deployed)
        assert commands_of(listed) - LEFT_OUT == commands_of(RIGHTS["bank"])
        assert commands_of(RIGHTS["bank"]) == commands_of(RIGHTS["shop"])

    def test_the_doctor_of_a_tenant_finds_nothing_and_leaves_nothing(
        self, server: RedisServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = {"url": server.url, "username": "bank", "password": PASSWORD, "prefix": "bank:"}
        flags = CliStore("redis", store).flags

        code = main(["doctor", "--page-bytes", "4KiB", "--json", *flags])

        checks = json.loads(capsys.readouterr().out)["checks"]
        assert (0, "ok") == (code, {one["topic"]: one["status"] for one in checks}["write"])
        assert not [one for one in checks if one["topic"] == "key space"]
        with as_tenant(server, "bank", "bank:") as storage:
            assert [] == list(storage.spaces())

    def test_the_doctor_names_what_a_user_of_fewer_rights_leaves(
        self, server: RedisServer, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with client_of_one(server) as admin:
            admin.execute_command("ACL", "SETUSER", "bank", "-hget", "-hdel")
        store = {"url": server.url, "username": "bank", "password": PASSWORD, "prefix": "bank:"}

        code = main(["doctor", "--page-bytes", "4KiB", "--json", *CliStore("redis", store).flags])

        checks = json.loads(capsys.readouterr().out)["checks"]
        (left,) = [one for one in checks if one["topic"] == "key space"]
        with as_tenant(server, "bank", "bank:") as storage:
            (space,) = storage.spaces()
        assert (code, left["status"]) == (0, "note")
        assert space.id in left["fact"]
        assert "add +hget to the ACL" in left["fact"]
        assert "hicache gc --model hicache-doctor --yes" in left["advice"]

    def test_the_users_of_the_guide_are_found(self) -> None:
        assert {"bank", "shop", "hf3fs", "default"} == set(RIGHTS)
        assert RIGHTS["default"] == "off"

    def test_a_tenant_does_all_that_an_engine_needs(self, server: RedisServer) -> None:
        with as_tenant(server, "bank", "bank:") as storage:
            storage.open_space(SPACE)
            assert [True] == storage.batch_set(SPACE, HASHES[:1], [page()])
            assert [True] == storage.batch_get(SPACE, HASHES[:1], [blank()])
            assert [SPACE] == list(storage.spaces())
            assert len(list(storage.scan(SPACE))) == 1
            assert storage.clear(SPACE) == 1
            assert [True] == storage.batch_delete(SPACE, HASHES[:1])

    def test_a_tenant_reaches_no_prefix_of_another(self, server: RedisServer) -> None:
        with (
            as_tenant(server, "bank", "bank:") as bank,
            as_tenant(server, "shop", "bank:") as intruder,
        ):
            bank.open_space(SPACE)
            bank.batch_set(SPACE, HASHES[:1], [page()])
            for attempt in (
                lambda: intruder.batch_exists(SPACE, HASHES[:1]),
                lambda: intruder.batch_get(SPACE, HASHES[:1], [blank()]),
                lambda: intruder.batch_set(SPACE, HASHES[:1], [page()]),
                lambda: intruder.batch_delete(SPACE, HASHES[:1]),
                lambda: list(intruder.spaces()),
                lambda: intruder.clear(SPACE),
            ):
                with pytest.raises(StorageUnavailable, match="NOPERM"):
                    attempt()
            assert [True] == bank.batch_exists(SPACE, HASHES[:1])

    @pytest.mark.parametrize(
        "command",
        [
            "SCAN 0",
            "KEYS *",
            "FLUSHALL",
            "CONFIG GET *",
            "CLIENT LIST",
            "CLIENT KILL ID 1",
            "MONITOR",
        ],
    )
    def test_a_tenant_neither_lists_nor_disturbs_others(
        self, server: RedisServer, command: str
    ) -> None:
        """SCAN would return the keys of all users, whatever the key pattern of this user."""
        assert "permission" in rights_of_others(server, "shop", *command.split())


class TestHf3fs:
    def test_the_index_does_with_the_rights_of_the_guide(
        self, server: RedisServer, tmp_path: Path
    ) -> None:
        url = f"redis://hf3fs:{PASSWORD}@127.0.0.1:{server.port}/0"
        with opened(server, tmp_path / "kv", index=url, capacity_nbytes="1MiB") as storage:
            stored(storage, range(50))
            assert hits(storage, range(40, 50)) == [True] * 10
            assert storage.page_times(SPACE, HASHES[49:50])[0].used_at_s
            assert [True] == storage.batch_delete(SPACE, HASHES[49:50])
            assert len(list(storage.scan(SPACE))) == 49
            assert storage.clear(SPACE) == 49
            assert not any(one.advice for one in storage.diagnose())
            assert storage.remove_space(SPACE.id) == 0
        with Hf3fsStorage.open_read_only(
            {"path": str(tmp_path / "kv"), "index": url, "timeout_s": 20}
        ) as storage:
            assert [] == list(storage.scan(SPACE))


class TestFiles:
    @pytest.mark.parametrize(
        ("backend", "config"),
        [
            ("file", {"path": "{root}", "capacity_nbytes": "1MiB"}),
            ("hf3fs", {"path": "{root}"}),
            ("fsspec", {"url": "file://{root}"}),
        ],
        ids=["file", "hf3fs", "fsspec"],
    )
    def test_with_umask_077_nobody_else_opens_a_page(
        self, tmp_path: Path, backend: str, config: dict[str, Any]
    ) -> None:
        root = tmp_path / "kv"
        fields = {key: str(value).replace("{root}", str(root)) for key, value in config.items()}
        before = os.umask(0o077)
        try:
            with open_storage(backend, fields) as storage:
                storage.open_space(SPACE)
                assert [True] == storage.batch_set(SPACE, [hash_of(1)], [page()])
        finally:
            os.umask(before)

        modes = {path: path.stat().st_mode & 0o077 for path in (root, *root.rglob("*"))}
        assert len(modes) > 2
        assert {} == {path: oct(mode) for path, mode in modes.items() if mode}


class TestQuotas:
    """A tenant that fills its own store takes nothing from another one."""

    PAGES = 600

    def fill(self, storage: HiCacheStorage) -> list[bool]:
        """Set many pages, ten at a time."""
        done: list[bool] = []
        for first in range(1000, 1000 + self.PAGES, 10):
            hashes = [hash_of(number) for number in range(first, first + 10)]
            done += storage.batch_set(SPACE, hashes, [page()] * 10)
        return done

    def test_a_root_with_a_capacity_of_its_own(self, tmp_path: Path) -> None:
        quota = 100 * page().nbytes
        with (
            open_storage(
                "file", {"path": str(tmp_path / "bank"), "capacity_nbytes": quota}
            ) as bank,
            open_storage(
                "file", {"path": str(tmp_path / "shop"), "capacity_nbytes": quota}
            ) as shop,
        ):
            bank.open_space(SPACE)
            assert all(bank.batch_set(SPACE, HASHES[:10], [page()] * 10))
            shop.open_space(SPACE)
            assert all(self.fill(shop))
            assert all(bank.batch_exists(SPACE, HASHES[:10]))
            used = sum(path.stat().st_size for path in (tmp_path / "shop/spaces").rglob("*/??/*"))
            assert 0 < used <= quota

    @pytest.mark.parametrize("policy", ["noeviction", "volatile-ttl"])
    def test_a_server_with_a_limit_of_its_own(self, tmp_path: Path, policy: str) -> None:
        quota = 3 << 20
        limits = ("--maxmemory", str(quota), "--maxmemory-policy", policy)
        with (
            RedisServer(tmp_path / "bank", *limits) as one,
            RedisServer(tmp_path / "shop", *limits) as other,
            open_storage("redis", {"url": one.url, "ttl_s": "1d"}) as bank,
            open_storage("redis", {"url": other.url, "ttl_s": "1d"}) as shop,
        ):
            bank.open_space(SPACE)
            assert all(bank.batch_set(SPACE, HASHES[:10], [page()] * 10))
            shop.open_space(SPACE)
            done = self.fill(shop)
            assert all(bank.batch_exists(SPACE, HASHES[:10]))
            assert all(done) == (policy == "volatile-ttl")
            assert 0 < len(list(shop.scan(SPACE))) * page().nbytes < quota

"""The flags by which the verbs choose a store: SGLang's flags, or a config file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_stores import CliStore, run_json
from s3_kit import config_of
from servers import RedisServer, S3Server, free_port

from hicache_storage.cli import main

_VERBS: tuple[list[str], ...] = (
    ["ls"],
    ["inspect", "0123"],
    ["verify"],
    ["gc", "--model", "any"],
    ["rm", "0123", "4567"],
    ["stats"],
    ["diff", "--to-backend", "memory"],
    ["copy", "--dry-run", "--to-backend", "memory"],
    ["copy", "--to-backend", "memory"],
)


def _config_file(path: Path, store: CliStore) -> Path:
    fields = {
        "model-path": "meta-llama/Llama-3.1-8B-Instruct",
        "hicache-storage-backend": store.backend,
        "hicache_storage_backend_extra_config": store.config,
    }
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
@pytest.mark.parametrize("verb", _VERBS, ids=lambda verb: verb[0])
def test_a_verb_that_looks_makes_no_store(
    verb: list[str], backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistyped, empty = tmp_path / "mistyped", tmp_path / "empty"
    empty.mkdir()
    for path in (mistyped, empty):
        assert main([*verb, *CliStore(backend, {"path": str(path)}).flags]) == 2
        message = capsys.readouterr().err
        assert f"there is no store at {path}" in message
        assert message.count("\n") == 1
    assert not mistyped.exists()
    assert [] == [*empty.iterdir()]


@pytest.mark.parametrize(("kind", "other"), [("file", "hf3fs"), ("hf3fs", "file")])
@pytest.mark.parametrize("verb", _VERBS, ids=lambda verb: verb[0])
def test_a_store_of_another_backend_is_no_empty_one(
    verb: list[str],
    kind: str,
    other: str,
    store_of: Callable[[str], CliStore],
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = store_of(kind)
    store.fill(range(2))

    assert main([*verb, *CliStore(other, store.config).flags]) == 2
    printed = capsys.readouterr()
    assert f"is a store of the backend {kind}: choose that backend" in printed.err
    assert printed.out == ""


def test_the_flags_of_a_server_in_the_readme_can_be_pasted(
    file_store: CliStore, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(2))
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    typed = readme.partition("sglang.launch_server ")[2].partition("--hicache-storage-backend")[0]

    assert main(["ls", *typed.replace("\\\n", "").split(), *file_store.flags]) == 0
    assert "2 pages" in capsys.readouterr().out


def test_a_config_file_holds_backend_and_config(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file_store.fill(range(3))
    config = _config_file(tmp_path / "engine.yaml", file_store)

    code, found = run_json(capsys, "ls", "--config", str(config))

    assert code == 0
    assert [3] == [one["pages"] for one in found["spaces"]]


def test_the_config_may_be_text_as_in_a_flag(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.toml"
    config.write_text(
        'hicache-storage-backend = "file"\n'
        f"hicache-storage-backend-extra-config = '{json.dumps(file_store.config)}'\n"
    )

    file_store.open().close()

    assert main(["ls", "--config", str(config)]) == 0
    assert "0 key spaces" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "json: hicache-storage-backend is required"),
        ('{"hicache-storage-backnd": "file"}', "did you mean 'hicache-storage-backend'?"),
        ('{"hicache-storage-backend": 1.5}', "must be text, not float"),
        (
            '{"hicache-storage-backend": "file", "hicache_storage_backend": "file"}',
            "this field is given twice",
        ),
        (
            '{"hicache-storage-backend": "file", "page-size": 0}',
            "engine.json: page-size: must be a whole number, 1 or more, not '0'\n",
        ),
        ("null", "must be an object with fields, but is empty"),
        ("[1]", "must be an object with fields"),
    ],
)
def test_a_wrong_config_file_is_one_line_and_exit_code_2(
    content: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "engine.json"
    config.write_text(content)

    assert main(["ls", "--config", str(config)]) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert message.count("\n") == 1


def test_a_config_file_goes_with_no_other_backend(
    file_store: CliStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config_file(tmp_path / "engine.json", file_store)

    assert main(["ls", "--config", str(config), *file_store.flags]) == 2
    assert "leave out --hicache-storage-backend" in capsys.readouterr().err


@pytest.fixture
def named_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a file with the stores `prod` and `backup`, which have the same key space."""
    path = tmp_path / "stores.toml"
    lines: list[str] = []
    for name in ("prod", "backup"):
        root = str(tmp_path / name)
        CliStore("file", {"path": root}).fill(range(3 if name == "prod" else 1))
        lines += [
            f"[{name}]",
            'hicache-storage-backend = "file"',
            f"hicache-storage-backend-extra-config = {{path = {json.dumps(root)}}}",
        ]
    path.write_text("\n".join(lines))
    monkeypatch.setenv("HICACHE_STORES", str(path))
    return path


def test_a_store_has_a_name(named_stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "diff", "--store", "prod", "--to-store", "backup")

    assert (1, 1, 2) == (code, found["both_pages"], found["only_source_pages"])
    assert main(["ls", "--store", "prod"]) == 0
    assert main(["copy", "--store", "prod", "--to-store", "prod"]) == 2
    assert "the same store" in capsys.readouterr().err


def test_the_file_of_stores_is_in_the_home_directory(
    named_stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "home/.config/hicache/stores.toml"
    place.parent.mkdir(parents=True)
    named_stores.rename(place)
    monkeypatch.delenv("HICACHE_STORES")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    assert main(["ls", "--store", "prod"]) == 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--store"], "needs a name: "),
        (["--store", "prd"], "has no store of this name; did you mean 'prod'?"),
        (["--store", "prod", "--config", "x.yaml"], "leave out one of them"),
        (["--store", "prod", "--hicache-storage-backend", "file"], "leave out --hicache-storage"),
        (["--store", "prod", "--page-size", "64"], "--store holds the engine's flags"),
        (["--store", "redis://:TOPSECRET@h"], "has no store of this name"),
    ],
)
def test_a_wrong_name_of_a_store_is_one_line(
    flags: list[str], reason: str, named_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", *flags]) == 2

    message = capsys.readouterr().err
    assert reason in message
    assert "TOPSECRET" not in message
    assert message.count("\n") == 1


def test_a_file_of_stores_that_cannot_be_looked_for_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HICACHE_STORES", f"{'x' * 300}.toml")

    assert main(["ls", "--store", "prod"]) == 2
    assert "cannot be read: File name too long\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "write it, or name another one in HICACHE_STORES"),
        ('prod = "file"', "must be a table with the fields of a store"),
        ('[prod]\nhicache-storage-backnd = "file"', "did you mean 'hicache-storage-backend'?"),
        ("[prod]", "hicache-storage-backend is required"),
        ("[prod", "is not TOML"),
    ],
)
def test_a_wrong_file_of_stores_is_one_line(
    content: str | None, reason: str, named_stores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named_stores.unlink() if content is None else named_stores.write_text(content)

    assert main(["ls", "--store", "prod"]) == 2

    message = capsys.readouterr().err
    assert "--store 'prod': " in message
    assert reason in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("verb", _VERBS, ids=lambda verb: verb[0])
def test_a_store_that_cannot_list_is_told_in_one_line(
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "unlisted_store.py").write_text(
        "from hicache_backends.memory import MemoryStorage\n"
        "class Unlisted(MemoryStorage):\n"
        "    def __init__(self, settings=None):\n"
        "        super().__init__(settings)\n"
        "        self.narrow(enumerable=False)\n"
    )
    monkeypatch.chdir(tmp_path)
    place = {
        "backend_name": "unlisted",
        "module_path": "unlisted_store",
        "class_name": "Unlisted",
    }

    assert main([*verb, *CliStore("dynamic", place).flags]) == 2
    message = capsys.readouterr().err
    assert "cannot list its pages" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("backend", ["redis", "s3"])
@pytest.mark.parametrize("verb", [*_VERBS, ["bench", "--pages", "4"]], ids=lambda verb: verb[0])
def test_a_store_that_is_down_is_one_line_without_its_secret(
    backend: str, verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    server = RedisServer(tmp_path) if backend == "redis" else S3Server(tmp_path, port)
    server.port = port
    store = (
        CliStore("redis", {"url": server.url, "password": "open-sesame", "timeout_s": 2})
        if isinstance(server, RedisServer)
        else CliStore("s3", config_of(server, timeout_s=2))
    )

    assert main([*verb, *store.flags]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "open-sesame" not in printed.err + printed.out
    assert S3Server.secret_key not in printed.err + printed.out


@pytest.mark.parametrize("verb", _VERBS, ids=lambda verb: verb[0])
def test_a_store_that_does_not_answer_is_one_line_in_time(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RedisServer(tmp_path) as server:
        store = CliStore("redis", {"url": server.url, "timeout_s": 1})
        store.fill(range(2))
        server.pause()

        assert main([*verb, *store.flags]) == 2

    assert capsys.readouterr().err.count("\n") == 1

"""SGLang's flags: defaults, meaning, and errors that name the field."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from hicache_storage import config
from hicache_storage.config import StorageChoice, add_arguments, load_extra_config
from hicache_storage.controller import ControllerSettings, PrefetchPolicy, WritePolicy
from hicache_storage.errors import ConfigError
from hicache_storage.host_pool import LAYOUTS

_SECRET = "hunter2"  # noqa: S105 - no message may repeat it


def _parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(argv)


def _choice(extra: dict[str, Any] | None = None, *argv: str) -> StorageChoice:
    given = [] if extra is None else [_EXTRA, json.dumps(extra)]
    return StorageChoice.from_arguments(
        _parsed("--hicache-storage-backend", "memory", *given, *argv)
    )


_EXTRA = "--hicache-storage-backend-extra-config"
_DYNAMIC = ("--hicache-storage-backend", "dynamic")
_ADAPTER = {
    "backend_name": "memory",
    "module_path": "hicache_storage.integrations.sglang",
    "class_name": "SGLangHiCacheStorage",
    "interface_v1": 1,
}


class TestFlags:
    def test_defaults_are_sglangs(self) -> None:
        expected = {
            "hicache_storage_backend": None,
            "hicache_storage_backend_extra_config": None,
            "hicache_storage_prefetch_policy": "timeout",
            "hicache_write_policy": "write_through",
            "hicache_mem_layout": "page_first",
            "page_size": None,
            "served_model_name": None,
        }

        assert expected == vars(_parsed())

    @pytest.mark.parametrize(
        ("flag", "value"),
        [
            ("--hicache-storage-prefetch-policy", "eager"),
            ("--hicache-write-policy", "write_around"),
            ("--hicache-mem-layout", "page_last"),
            ("--page-size", "0"),
            ("--page-size", "64.5"),
            ("--page-size", "9" * 5000),
        ],
    )
    def test_a_wrong_value_is_refused_by_flag(self, flag: str, value: str) -> None:
        with pytest.raises(argparse.ArgumentError, match=flag):
            _parsed(flag, value)

    def test_prefetch_policies_are_the_controllers(self) -> None:
        assert sorted(config.PREFETCH_POLICIES) == sorted(policy.value for policy in PrefetchPolicy)

    def test_write_policies_are_the_controllers(self) -> None:
        assert sorted(config.WRITE_POLICIES) == sorted(policy.value for policy in WritePolicy)

    def test_layouts_are_the_host_pools(self) -> None:
        assert sorted(config.MEM_LAYOUTS) == sorted(LAYOUTS)


class TestStorageChoice:
    def test_a_backend_is_required(self) -> None:
        with pytest.raises(ConfigError, match="--hicache-storage-backend is required"):
            StorageChoice.from_arguments(_parsed())

    def test_flags_arrive(self) -> None:
        choice = _choice(
            None,
            "--page-size",
            "32",
            "--served-model-name",
            "m",
            "--hicache-mem-layout",
            "page_head",
        )

        assert choice.page_tokens == 32
        assert choice.served_model_name == "m"
        assert choice.mem_layout == "page_head"

    def test_knob_defaults_are_the_controllers(self) -> None:
        assert _choice().controller == ControllerSettings()

    def test_knobs_are_taken_out_of_the_backends_config(self) -> None:
        choice = _choice(
            {
                "prefetch_threshold": 64,
                "prefetch_timeout_base": 2,
                "prefetch_timeout_per_ki_token": 0.5,
                "hicache_storage_pass_prefix_keys": True,
                "capacity_nbytes": 1024,
            }
        )

        assert choice.config == {"capacity_nbytes": 1024}
        assert choice.controller.prefetch_threshold_tokens == 64
        assert choice.controller.prefetch_timeout_base_s == 2
        assert choice.controller.prefetch_timeout_per_ki_token_s == 0.5
        assert choice.pass_prefix_keys is True

    @pytest.mark.parametrize(
        ("knob", "value"),
        [
            ("prefetch_threshold", 1.5),
            ("prefetch_threshold", True),
            ("prefetch_threshold", "256"),
            ("prefetch_threshold", -1),
            ("prefetch_timeout_base", None),
            ("prefetch_timeout_base", float("inf")),
            ("prefetch_timeout_base", 1e300),
            ("prefetch_timeout_base", True),
            ("prefetch_timeout_base", int("9" * 90)),
            ("prefetch_threshold", int("9" * 90)),
            ("prefetch_threshold", float("nan")),
            ("prefetch_timeout_per_ki_token", [1]),
            ("hicache_storage_pass_prefix_keys", 1),
        ],
    )
    def test_a_knob_of_the_wrong_type_is_named(self, knob: str, value: Any) -> None:
        with pytest.raises(ConfigError, match=f"{knob}: must"):
            _choice({knob: value})

    def test_open_gives_the_backend_its_fields(self) -> None:
        with _choice({"capacity_nbytes": "1KiB", "prefetch_threshold": 1}).open() as storage:
            assert storage.stats().capacity_nbytes == 1024

    @pytest.mark.parametrize(
        "own", [{"capacity_nbytes": 1024}, {"config": {"capacity_nbytes": 1024}}]
    )
    def test_an_engines_flags_choose_the_backend_below_the_adapter(
        self, own: dict[str, Any]
    ) -> None:
        """The adapter is a class of SGLang, which a program that looks at the store does not need."""
        choice = _choice({**_ADAPTER, "adapter": {"metrics_port": 9401}, **own}, *_DYNAMIC)

        assert (choice.backend, choice.config) == ("memory", {"capacity_nbytes": 1024})

    def test_the_adapter_needs_no_module(self) -> None:
        """The plug-in of SGLang adds it."""
        choice = _choice({"backend_name": "memory", "capacity_nbytes": 1024}, *_DYNAMIC)

        assert (choice.backend, choice.config) == ("memory", {"capacity_nbytes": 1024})

    def test_another_module_is_left_to_the_registry(self) -> None:
        other = {"backend_name": "acme", "module_path": "acme", "class_name": "Acme"}

        choice = _choice(other, *_DYNAMIC)

        assert (choice.backend, choice.config) == ("dynamic", other)

    @pytest.mark.parametrize("wrong", [{"backend_name": 1}, {"config": "@store.yaml"}])
    def test_an_adapter_without_a_backend_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="backend_name must be a string, and config an"):
            _choice({**_ADAPTER, **wrong}, *_DYNAMIC)

    def test_the_config_is_not_in_the_repr(self) -> None:
        assert _SECRET not in repr(_choice({"password": _SECRET}))


class TestExtraConfig:
    def test_no_text_is_no_field(self) -> None:
        assert load_extra_config(None) == {}
        assert load_extra_config("") == {}

    def test_inline_json(self) -> None:
        assert load_extra_config('{"a": {"b": [1, "x"]}}') == {"a": {"b": [1, "x"]}}

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("c.json", '{"path": "/p", "n": 3}'),
            ("c.toml", 'path = "/p"\nn = 3\n'),
            ("c.yaml", "path: /p\nn: 3\n"),
            ("c.yml", "{path: /p, n: 3}\n"),
        ],
    )
    def test_a_file_by_its_extension(self, tmp_path: Path, name: str, text: str) -> None:
        file = tmp_path / name
        file.write_text(text)

        assert load_extra_config(f"@{file}") == {"path": "/p", "n": 3}

    @pytest.mark.parametrize(
        ("name", "content", "reason"),
        [
            ("c.json", b'{"a": }', "is not JSON: expecting value at line 1, column 7"),
            ("c.json", b"", "is not JSON"),
            ("c.json", b"[1]", "must be an object with fields, not list"),
            ("c.json", b"[" * 100_000, "is not JSON"),
            ("c.toml", b"a = \n", "is not TOML"),
            ("c.yaml", b"a: b: c\n", "is not YAML: .* at line 1, column 5"),
            ("c.yaml", b"a: \x01\n", "is not YAML"),
            ("c.yaml", b"", "must be an object with fields, but is empty"),
            ("c.yaml", b"1: x\n", "a field's name must be a string, not 1"),
            ("c.yaml", b"? \n", "a field's name must be a string, not None"),
            *(
                ("c.yaml", b"a: " + value + b"\n", "is not YAML: a value is not of the type")
                for value in (
                    b'!!int ""',
                    b'!!float ""',
                    b"!!bool x",
                    b"!!timestamp x",
                    b"!!map [1]",
                )
            ),
            ("c.json", b"\xff\xfe", "is not UTF-8 text"),
            ("c.ini", b"", "must end in one of .json, .toml, .yaml, .yml"),
        ],
    )
    def test_a_wrong_file_is_named_with_the_reason(
        self, tmp_path: Path, name: str, content: bytes, reason: str
    ) -> None:
        file = tmp_path / name
        file.write_bytes(content)

        with pytest.raises(ConfigError, match=f"{file}: {reason}"):
            load_extra_config(f"@{file}")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("c.yaml", "password: *TOPSECRET\n"),
            ("c.yaml", "password: !TOPSECRET\n"),
            ("c.yaml", "a: 1\npassword: '%TOPSECRET\n"),
            ("c.toml", "password = TOPSECRET\n"),
            ("c.toml", "['{TOPSECRET}']\n['{TOPSECRET}']\n"),
            ("c.json", '{"{TOPSECRET}": 1, "{TOPSECRET}": 2}'),
            ("c.json", '{"password": TOPSECRET}'),
            ("c.json", '{"url": "redis://:TOPSECRET@h" "b": 1}'),
            ("c.toml", 'url = "redis://:TOPSECRET@h\n'),
            ("c.yaml", "url: redis: //:TOPSECRET@h: x\n"),
        ],
    )
    def test_no_message_quotes_a_file(self, tmp_path: Path, name: str, content: str) -> None:
        file = tmp_path / name
        file.write_text(content)

        with pytest.raises(ConfigError) as caught:
            load_extra_config(f"@{file}")

        assert "TOPSECRET" not in str(caught.value)

    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"no\.json: cannot be read: No such file"):
            load_extra_config(f"@{tmp_path}/no.json")

    @pytest.mark.parametrize(
        "text", ["nonsense", '{"a": 1', "[]", "3", '"x"', "null", '{"a": 1, "a": 2}']
    )
    def test_wrong_inline_json_names_the_flag(self, text: str) -> None:
        with pytest.raises(ConfigError, match=_EXTRA):
            load_extra_config(text)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("c.json", '{"path": "/a", "n": 1, "path": "/b"}'),
            ("c.json", '{"below": {"path": "/a", "path": "/a"}}'),
            ("c.yaml", "path: /a\nn: 1\npath: /b\n"),
            ("c.yaml", "below: {path: /a, path: /a}\n"),
            ("c.toml", 'path = "/a"\npath = "/b"\n'),
        ],
    )
    def test_a_field_that_is_there_twice_is_refused(
        self, tmp_path: Path, name: str, text: str
    ) -> None:
        """The parsers of JSON and YAML silently drop all values except the last."""
        file = tmp_path / name
        file.write_text(text)

        with pytest.raises(ConfigError, match=r"path' is given twice|Cannot overwrite a value"):
            load_extra_config(f"@{file}")

    @pytest.mark.parametrize("value", ["!!set {.nan}", "!!omap [a: .inf]", "[[.inf]]"])
    def test_a_number_that_is_not_finite_is_found_in_every_kind_of_list(
        self, tmp_path: Path, value: str
    ) -> None:
        file = tmp_path / "c.yaml"
        file.write_text(f"a: {value}\n")

        with pytest.raises(ConfigError, match="must be a finite number"):
            load_extra_config(f"@{file}")

    def test_a_few_lines_of_aliases_are_no_billion_values(self, tmp_path: Path) -> None:
        lines = ["a0: &a0 [1, 2]"]
        lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(12)]
        file = tmp_path / "c.yaml"
        file.write_text("\n".join(lines))

        with pytest.raises(ConfigError, match="more than 10,000 values"):
            load_extra_config(f"@{file}")

    def test_a_yaml_file_may_merge_what_it_overrides(self, tmp_path: Path) -> None:
        file = tmp_path / "c.yaml"
        file.write_text("base: &base {path: /a, n: 1}\nmine: {<<: *base, path: /b}\n")

        assert load_extra_config(f"@{file}")["mine"] == {"path": "/b", "n": 1}

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("c.json", '{"timeout_s": NaN}'),
            ("c.json", '{"timeout_s": -Infinity}'),
            ("c.json", '{"timeout_s": 1e999}'),
            ("c.json", '{"below": [{"timeout_s": 1e999}]}'),
            ("c.toml", "timeout_s = nan\n"),
            ("c.yaml", "timeout_s: .inf\n"),
        ],
    )
    def test_a_number_that_is_not_finite_is_refused(
        self, tmp_path: Path, name: str, text: str
    ) -> None:
        file = tmp_path / name
        file.write_text(text)

        with pytest.raises(ConfigError, match="timeout_s: must be a finite number"):
            load_extra_config(f"@{file}")

    @pytest.mark.parametrize(("name", "mark"), [("json", ":"), ("toml", "="), ("yaml", ": ")])
    def test_a_number_of_thousands_of_digits_is_refused(
        self, tmp_path: Path, name: str, mark: str
    ) -> None:
        """Python raises ValueError when it reads or writes such a number."""
        file = tmp_path / f"c.{name}"
        text = f'"n"{mark}{"9" * 5000}'
        file.write_text(f"{{{text}}}" if name == "json" else text)

        with pytest.raises(ConfigError, match="digits"):
            load_extra_config(f"@{file}")

    @pytest.mark.parametrize("name", ["~nosuchuser/c.json", "~\0.json", "a\0.json", "~\ud800.json"])
    def test_a_name_that_no_file_can_have_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{_EXTRA}.*(not a file name|no home directory)"):
            load_extra_config(f"@{name}")

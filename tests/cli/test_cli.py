"""The command line as a whole: light imports, and one line for each error."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import cli_page
import pytest
from cli_stores import CliStore
from composed_stores import file_member
from hicache_conformance import cli as conformance
from hicache_conformance.cli import main as conformance_main
from pages import hash_of, space
from servers import ROOT

import hicache_storage
from hicache_storage import native
from hicache_storage.cli import main
from hicache_storage.cli.operations.proofs import Proof
from hicache_storage.cli.verbs import HICACHE
from hicache_storage.errors import install_command
from hicache_storage.registry import open_storage
from hicache_storage.request_log import Operation, Reason, RequestRecord

_REPLAY = ["replay", "--hicache-storage-backend", "memory"]
_EXTRA = "--hicache-storage-backend-extra-config"
_HEAVY = {"numpy", "torch", "pydantic", "rich", "yaml", "xxhash", "hicache_backends"}


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        *([verb, "--help"] for verb in ("replay", "backends", "ls", "inspect", "verify", "gc")),
        *(
            [verb, "--help"]
            for verb in ("copy", "diff", "rm", "stats", "doctor", "bench", "explain")
        ),
    ],
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    program = (
        "import sys\nfrom hicache_storage.cli import main\n"
        f"try: main({argv!r})\nexcept SystemExit as end: assert end.code == 0\n"
        "print(*sorted(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )

    loaded = {name.partition(".")[0] for name in ran.stdout.splitlines()[-1].split()}
    assert "hicache_storage" in loaded
    assert not _HEAVY & loaded


@pytest.mark.parametrize("program", [main, conformance.main])
def test_the_version_is_printed(
    program: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program(["--version"])

    name, version, plane = capsys.readouterr().out.split(maxsplit=2)
    assert name in {"hicache", "hicache-conformance"}
    assert hicache_storage.__version__ == version
    compiled = native.implementation == "compiled"
    assert plane.startswith("(compiled data plane)" if compiled else "(data plane in Python: ")
    assert end.value.code == 0


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "VERB"),
        (["repaly"], "invalid choice: 'repaly'"),
        (["backends", "extra"], "unknown argument 'extra'"),
        (["replay"], "--hicache-storage-backend is required"),
        (["replay", "--hicache-storage-backend", "memroy"], "did you mean 'memory'?"),
        (["replay", "--hicache-storage-backend"], "expected one argument"),
        ([*_REPLAY, "--page-siz", "64"], "did you mean '--page-size'?"),
        ([*_REPLAY, "--page-size", "x"], "--page-size: must be a whole number"),
        ([*_REPLAY, "--page-size", "48"], "must divide the trace's blocks"),
        ([*_REPLAY, "--requests", "0"], "--requests: must be a whole number"),
        ([*_REPLAY, "--conversations", "-1"], "--conversations"),
        ([*_REPLAY, "--seed", "x"], "--seed: must be a whole number"),
        ([*_REPLAY, "--requests", "１２"], "--requests: must be a whole number"),  # noqa: RUF001
        ([*_REPLAY, "--requests", "10000001"], "--requests: must be at most 10,000,000"),
        ([*_REPLAY, "--conversations", "1000001"], "--conversations: must be at most 1,000,000"),
        ([*_REPLAY, "--ranks", "257"], "--ranks: must be at most 256"),
        ([*_REPLAY, "--speed", "10x"], "--speed: must be a number greater than 0"),
        ([*_REPLAY, "--speed", "inf"], "--speed: must be a number greater than 0"),
        ([*_REPLAY, "--scale-bytes", "1/100000"], "must make pages at most 16,384 times smaller"),
        ([*_REPLAY, "--faults", "get:raise@5 %"], "needs a number, 0 or more, not '5 '"),
        ([*_REPLAY, "--faults", "get:raise@1_0%"], "needs a number, 0 or more, not '1_0'"),
        ([*_REPLAY, "--faults", "get:hang@5%,hang_s=1e9"], "must be at most 600 seconds"),
        ([*_REPLAY, "--faults", "get:miss@5%,seed=1,seed=2"], "seed is given twice"),
        ([*_REPLAY, "--speed", "0"], "--speed: must be a number greater than 0"),
        ([*_REPLAY, "--scale-bytes", "0"], "--scale-bytes: must be a number like 1/64"),
        ([*_REPLAY, "--host-size", "much"], "'1GiB'; the units are"),
        ([*_REPLAY, "--host-size", "1KiB"], "holds no page"),
        ([*_REPLAY, "--host-size", "4095PiB"], "this machine has"),
        ([*_REPLAY, "--checksum", "md5"], "--checksum: invalid choice: 'md5'"),
        ([*_REPLAY, "--model", "llama"], "--model: invalid choice: 'llama'"),
        ([*_REPLAY, "--pool", "kv:mha,layers=2"], "heads: this field is required"),
        ([*_REPLAY, "--pool", "kv:mla,layers=1,dim=8,dtype=int3"], "int3"),
        ([*_REPLAY, "--pool", "kv:mla,layers=1,dim=8", "--model", "qwen3-8b"], "not allowed with"),
        ([*_REPLAY, "--model", "deepseek-v3", "--hicache-mem-layout", "page_head"], "page_head"),
        ([*_REPLAY, "--hicache-mem-layout", "page_last"], "--hicache-mem-layout"),
        ([*_REPLAY, "--served-model-name", "\udc80"], "UTF-8"),
        ([*_REPLAY, "--trace", "/no/such.jsonl"], "/no/such.jsonl: cannot be read"),
        ([*_REPLAY, "--json", "/no/such/file.json"], "there is no directory /no/such"),
        ([*_REPLAY, "--json", "x" * 300], "cannot be written: File name too long"),
        (["explain", "x" * 300], "cannot be read: File name too long"),
        ([*_REPLAY, "--json", "/"], "is a directory"),
        ([*_REPLAY, _EXTRA, "{"], "is not JSON"),
        ([*_REPLAY, _EXTRA, '{"prefetch_threshold": "9"}'], "prefetch_threshold: must be an int"),
        ([*_REPLAY, _EXTRA, '{"capacty_nbytes": 9}'], "did you mean 'capacity_nbytes'?"),
        (["replay", "--hicache-storage-backend", "dynamic"], "backend_name"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(argv)

    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("hicache: ")
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")
    assert reason in printed.err


@pytest.mark.parametrize("flag", ["--seed", "--conversations"])
def test_flags_of_the_synthetic_trace_do_not_go_with_a_file(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*_REPLAY, "--trace", "t", flag, "3"]) == 2
    assert f"{flag} is for the synthetic trace" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    """An example is `hicache backends --json | head -c 0`."""
    with subprocess.Popen(
        [sys.executable, "-m", "hicache_storage.cli", "backends", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        process.stdout.close()
        assert process.stderr
        assert process.stderr.read() == ""
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["backends", "--json"],
        ["backends"],
        ["plan", "--conversations", "2"],
        ["--help"],
        ["--version"],
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_is_one_line(argv: list[str], unbuffered: str) -> None:
    """An example is a file on a full disk."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hicache_storage.cli", *argv],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )

    expected = "hicache: standard output cannot be written: No space left on device\n"
    assert (2, expected) == (done.returncode, done.stderr)


_PRESS = """
import importlib, os, signal, sys
main = importlib.import_module(sys.argv[2]).main

class CtrlC:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
sys.exit(main(["--version"]))
"""


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("argparse", "hicache_storage.cli"),
        ("hicache_storage.cli.verify", "hicache_storage.cli"),
        ("argparse", "hicache_conformance.cli"),
        ("hicache_conformance.cli.matrix", "hicache_conformance.cli"),
    ],
)
def test_ctrl_c_during_the_first_imports_is_quiet(module: str, command: str) -> None:
    argv = [sys.executable, "-c", _PRESS, module, command]
    done = subprocess.run(argv, check=False, capture_output=True)

    assert (130, b"", b"") == (done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("argv", [["--version"], _REPLAY])
def test_a_data_plane_that_cannot_be_had_is_one_line(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache_storage.cli", *argv],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "HICACHE_NATIVE": "yes"},
    )

    expected = (
        "hicache: HICACHE_NATIVE is 'yes': set it to 0 (Python) or 1 (compiled), or unset it\n"
    )
    assert (2, expected) == (done.returncode, done.stderr)


@pytest.mark.parametrize(
    ("closed", "argv", "code", "said"),
    [
        (">&-", "backends", 2, "hicache: standard output cannot be written: Bad file descriptor\n"),
        ("2>&-", "nonsense", 2, ""),
        ("<&-", "backends --json", 0, ""),
    ],
)
def test_a_stream_that_is_closed_changes_no_exit_code(
    closed: str, argv: str, code: int, said: str
) -> None:
    """A job of cron or of a daemon may have closed them."""
    done = subprocess.run(
        ["/bin/sh", "-c", f'"$0" -m hicache_storage.cli {argv} {closed}', sys.executable],
        check=False,
        capture_output=True,
        text=True,
    )

    assert (code, said) == (done.returncode, done.stderr)


_CONFIG = '{"url": "redis://:TOPSECRET@h"}'


@pytest.mark.parametrize(
    "argv",
    [
        ["--hicache-storage-backend", _CONFIG],
        ["--hicache-storage-backend", "redis://:TOPSECRET@h"],
        ["--hicache-storage-prefetch-policy", _CONFIG],
        [f"--hicache-write-policy={_CONFIG}"],
        ["--page-size", _CONFIG],
        ["--config", _CONFIG],
        ["--config", f"{_CONFIG}.yaml"],
        [f"--no-such-flag={_CONFIG.replace(' ', '')}"],
        [f"--list={_CONFIG}"],
        ["--hicache-storage-backend", "memory", "--space", _CONFIG, "--faults", _CONFIG],
        [_CONFIG],
    ],
)
def test_no_message_repeats_a_config_in_the_place_of_something_else(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for verb in (["replay"], ["ls"], ["bench"], ["gc"], ["doctor", "--json"]):
        assert main([*verb, *argv]) == 2
        assert "TOPSECRET" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", "URL", "URL"],
        ["matrix", "URL"],
        ["--hicache-storage-backend", "memory", "--waivers", "URL"],
    ],
)
def test_a_url_is_no_file_of_the_kit(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    given = [word.replace("URL", "redis://:TOPSECRET@h:1/0") for word in argv]

    assert conformance.main(given) == 3

    assert "TOPSECRET" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("backend", ["file", "hf3fs"])
def test_a_url_is_no_directory(
    backend: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.dumps({"path": "redis://:TOPSECRET@h:1/0"})
    flags = ["--hicache-storage-backend", backend, "--hicache-storage-backend-extra-config", config]

    assert main(["doctor", *flags]) == 2

    expected = f"hicache: {backend}: path: must be a directory, not a URL\n"
    assert expected == capsys.readouterr().err
    assert [] == [*tmp_path.iterdir()]


def test_control_characters_of_a_message_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--config", "\x1b[2J\u202e.toml"]) == 2
    assert capsys.readouterr().err.strip().isprintable()


def test_warnings_of_every_verb_are_lines_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_storage("file", {"path": str(tmp_path)}).close()
    (tmp_path / "model.safetensors").touch()
    config = json.dumps({"path": str(tmp_path)})
    flags = ["--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config", config]

    assert main(["doctor", "--page-bytes", "4KiB", "--pages", "4", *flags]) in (0, 1)

    assert capsys.readouterr().err.startswith("hicache: warning: file: ")


# The commands in docs/cli.md run, and its tables name the verbs, reasons and exit codes that exist.

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
(CONFIG,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [
    command
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for command in block.replace("\\\n", " ").splitlines()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("engine.yaml").write_text(CONFIG)
    Path("backup.yaml").write_text(CONFIG.replace('"pages"', '"backup"'))
    if "backup.yaml" in command and "diff" in command:
        CliStore("file", {"path": "backup"}).fill(range(3), space())
    store = CliStore("file", {"path": "pages"})
    key_space = store.fill(range(12), space())
    store.fill(range(2), space(model="old-model"))
    store.fill(range(2), space(tenant="acme", revision="r1"))
    if "--store" in command:
        monkeypatch.setenv("HICACHE_STORES", str(write_named_stores(store)))
    if "disks" in command or "tiers" in command:
        make_composed_stores()
    write_log(Path("explain.jsonl"))
    known = {"$SPACE": key_space.id[:8], "$HASH": hash_of(3)}
    program, *argv = (known.get(word, word) for word in shlex.split(command))

    assert program == "hicache"
    if "--compare" in argv:  # a shared machine may be slower the second time
        assert main([*argv[: argv.index("--compare")], "--json", "before.json"]) == 0
        assert main(argv) in (0, 1)
    else:
        shows_what_would_go = argv[0] in {"rm", "gc"} and "--yes" not in argv
        differs = argv[0] == "diff" and "backup.yaml" in argv
        assert main(argv) == (shows_what_would_go or differs)


def write_named_stores(prod: CliStore) -> Path:
    """Write the page's file of stores, with stores of this test instead of the ones it names."""
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    places = (prod, CliStore("file", {"path": "kept"}))
    stores = dict(zip(tomllib.loads(text), places, strict=True))
    path = Path("stores.json").absolute()
    fields = {
        name: {
            "hicache-storage-backend": one.backend,
            "hicache-storage-backend-extra-config": one.config,
        }
        for name, one in stores.items()
    }
    path.write_text(json.dumps(fields))
    return path


def make_composed_stores() -> None:
    """Make the stores that `tiers.yaml`, `two-disks.yaml` and `three-disks.yaml` describe."""
    disks = [file_member(name, Path(name)) for name in "abc"]
    nvme = {"name": "nvme", "backend": "striped", "config": {"stripes": disks[:2]}}
    tiers = {"tiers": [nvme, file_member("bucket", Path("bucket"))]}
    for name, backend, config in (
        ("tiers", "tiered", tiers),
        ("two-disks", "striped", {"stripes": disks[:2]}),
        ("three-disks", "striped", {"stripes": disks}),
    ):
        flags = {
            "hicache-storage-backend": backend,
            "hicache-storage-backend-extra-config": config,
        }
        Path(f"{name}.yaml").write_text(json.dumps(flags))
    store = CliStore("tiered", tiers)
    store.fill(range(12), space())
    store.fill(range(2), space(model="old-model"))


def write_log(path: Path) -> None:
    """Write the record of the request that the page explains."""
    page_hash = "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    record = RequestRecord(
        at_s=1_000_000_000,
        engine="vllm",
        rank=0,
        operation=Operation.PREFETCH,
        request="chat-7",
        asked_pages=32,
        hit_pages=20,
        page=20,
        page_hash=page_hash,
        pool="group_0.FullAttentionSpec",
        reason=Reason.TIMEOUT,
        reasons={Reason.TIMEOUT: 3, Reason.ABSENT: 9},
        elapsed_s=0.0482,
    )
    path.write_text(record.line())


def test_the_story_is_what_the_page_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path / "explain.jsonl")

    assert main(["explain", str(tmp_path / "explain.jsonl"), "--request", "chat-7"]) == 0

    assert capsys.readouterr().out in PAGE


def test_the_table_of_a_logs_reasons_is_complete() -> None:
    table = PAGE.partition("| reason | the first missing page |")[2]

    assert {reason.name.lower() for reason in Reason} <= set(re.findall(r"`(\w+)`", table))


def test_commands_of_every_verb_are_shown() -> None:
    elsewhere = {"backends", "plan", "replay"}
    verbs = {verb.__name__.rpartition(".")[2] for verb in HICACHE.verbs} - elsewhere

    assert verbs == {shlex.split(command)[1] for command in COMMANDS}


def test_the_table_of_reasons_is_complete() -> None:
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`\w+`.*?) \|", PAGE, re.MULTILINE)))
    )

    assert {proof.value for proof in Proof} - {"ok"} <= named


# docs/cli-reference.md agrees with the parsers.

REFERENCE = (ROOT / "docs" / "cli-reference.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert cli_page.page() == REFERENCE, "run `make cli-page`"


def test_every_verb_has_a_section() -> None:
    verbs = [
        f"{program.name} {verb.__name__.rpartition('.')[2]}"
        for program in cli_page.PROGRAMS
        for verb in program.verbs
    ]

    assert verbs == re.findall(r"^### `(.*)`$", REFERENCE, re.MULTILINE)


# `--version` and `--print-completion` of both commands, in a real shell.

PROGRAMS = {"hicache": main, "hicache-conformance": conformance_main}
_COMPLETE = """
set -euo pipefail
export PATH="$(dirname "$1"):$PATH"
shift
{sources}
COMP_WORDS=("$@")
COMP_CWORD=$(( $# - 1 ))
function="$(complete -p "$1" | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
"$function" "$1" "${{COMP_WORDS[$COMP_CWORD]}}" || true
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def _completed(*words: str) -> set[str]:
    """Return the completions of the last word, in a bash that has sourced the page's command."""
    (block,) = PAGE.split("```bash\n")[1:]
    script = _COMPLETE.format(sources=block.partition("```")[0])
    ran = subprocess.run(
        ["/bin/bash", "-c", script, "bash", sys.executable, *words],
        capture_output=True,
        text=True,
        check=True,
    )
    return {word.strip() for word in ran.stdout.splitlines()} - {""}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["hicache", "be"], {"bench"}),
        (["hicache", "bench", "--page"], {"--page-bytes", "--pages"}),
        (["hicache", "bench", "--model", "qwen"], {"qwen3-8b", "qwen3-32b"}),
        (["hicache-conformance", "self"], {"selftest"}),
        (["hicache-conformance", "--rep"], {"--report"}),
    ],
)
def test_words_are_completed(words: list[str], expected: set[str]) -> None:
    assert expected == _completed(*words)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(
    program: str, shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[program](["--print-completion", shell])

    assert ended.value.code == 0
    assert program in capsys.readouterr().out


def test_a_missing_library_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert main(["--print-completion", "bash"]) == 2
    assert install_command("completion") in capsys.readouterr().err

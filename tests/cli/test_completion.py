"""`--version` and `--print-completion` of both commands, in a real shell."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hicache_conformance.cli import main as conformance_main

from hicache_storage.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
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
    """Return the completions of the last word, in a bash that has sourced what the page says."""
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
    assert 'pip install "hicache-storage[completion]"' in capsys.readouterr().err

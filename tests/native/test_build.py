"""The build of the data plane. A compiled module is used only if it was built from its C sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hicache_storage
from hicache_storage import native
from hicache_storage.native._sources import checksum

PACKAGE = Path(hicache_storage.__file__).parent
SAY = "from hicache_storage import native; print(native.implementation)"

pytestmark = pytest.mark.skipif(
    native.implementation == "reference" or not checksum(PACKAGE / "native"),
    reason="there is no compiled data plane with its sources here",
)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the SDK. Return the folder of the data plane in the copy."""
    kept = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "hicache_storage", ignore=kept)
    return tmp_path / "hicache_storage" / "native"


def run(sources: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the copy of the SDK first on its path."""
    variables = {"PYTHONPATH": str(sources.parents[1]), "PYTHONSAFEPATH": "1", **variables}
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def change(sources: Path) -> None:
    with (sources / "xxh3.h").open("a", encoding="utf-8") as header:
        header.write("/* changed */\n")


def test_a_module_of_these_sources_is_used_without_a_warning(sources: Path) -> None:
    done = run(sources, "-c", SAY)

    assert ("compiled\n", "") == (done.stdout, done.stderr)


def test_a_module_of_other_sources_is_not_used_with_a_warning(sources: Path) -> None:
    change(sources)

    done = run(sources, "-c", SAY, HICACHE_NATIVE="")

    assert "reference\n" == done.stdout
    assert 1 == len(done.stderr.splitlines())
    assert f"Rebuild it: python {sources / '_build.py'}" in done.stderr


def test_a_module_of_other_sources_cannot_be_required(sources: Path) -> None:
    change(sources)

    done = run(sources, "-c", SAY, HICACHE_NATIVE="1")

    assert done.returncode
    assert "ImportError: HICACHE_NATIVE is 1, but the compiled module does not match" in done.stderr


def test_a_new_source_is_a_change(sources: Path) -> None:
    before = checksum(sources)
    (sources / "more.c").touch()

    assert before != checksum(sources)


def test_a_module_without_sources_is_used_as_in_a_wheel(sources: Path) -> None:
    for source in sources.rglob("*.[ch]"):
        source.unlink()

    assert "compiled\n" == run(sources, "-c", SAY).stdout


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_a_module_that_was_built_again_is_used(sources: Path) -> None:
    change(sources)

    assert 0 == run(sources, str(sources / "_build.py")).returncode
    assert "compiled\n" == run(sources, "-c", SAY).stdout


@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("no-such-compiler", "there is no C compiler (no-such-compiler)"),
        ("false", "the compiler failed: false printed no error"),
    ],
)
def test_one_line_gives_the_reason_that_nothing_was_built(
    sources: Path, compiler: str, why: str
) -> None:
    done = run(sources, str(sources / "_build.py"), CC=compiler)

    assert (1, f"no compiled data plane: {why}\n") == (done.returncode, done.stdout)

"""Runs all tests and measurements that need a GPU, in less than ten minutes: `make gpu`.

python tests/gpu.py [--device cuda] [--out FOLDER]

The program installs nothing. It runs the working tree with the packages of this Python, and compiles
the data plane in place where there is a C compiler. `--device cpu` is a dry run: the same tests without
those of CUDA, and a small benchmark.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
MODULES = ("torch", "numpy", "pydantic", "xxhash", "rich", "pytest", "pytest_timeout")
TESTS = ("tests/device_pool", "tests/host_pool/test_memory.py")
BUILD_S, TESTS_S, BENCHMARK_S = 60, 200, 300
BENCHMARK = {
    "cuda": [
        *("--pages", "32", "--rounds", "5", "--stop-after", "150"),
        *("--layouts", "page_first,page_first_direct,layer_first,page_head"),
    ],
    "cpu": ["--pages", "2", "--rounds", "3", "--layouts", "page_first"],
}


@dataclass(slots=True)
class Summary:
    """The lines of the summary, and whether all went well."""

    lines: list[str] = field(default_factory=list[str])
    failed: bool = False

    def add(self, name: str, text: str, *, failed: bool = False) -> None:
        self.lines.append(f"{name:>10}  {text}")
        self.failed |= failed


def missing(modules: Sequence[str]) -> list[str]:
    """Return the modules that this Python does not have."""
    return [name for name in modules if find_spec(name) is None]


def environment() -> dict[str, str]:
    """Return the environment of the programs, with the working tree first on Python's path."""
    folders = [ROOT, ROOT / "backends", ROOT / "conformance", os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if str(folder)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run(arguments: Sequence[str], limit_s: float) -> str:
    """Run a Python program. Return "", or the reason why it failed."""
    command = [sys.executable, *arguments]
    sys.stdout.flush()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), timeout=limit_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"not finished in {limit_s} s"
    return f"exit status {done}" if done else ""


def machine(device: str, summary: Summary) -> None:
    torch = importlib.import_module("torch")
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"make gpu: torch sees no CUDA ({sys.executable}, torch {torch.__version__})")
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} (dry run)"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    summary.add("device", f"{name}, CUDA {torch.version.cuda}, {versions}")


def data_plane(summary: Summary) -> None:
    run(["hicache_storage/native/_build.py"], BUILD_S)
    asked = "from hicache_storage import native; print(native.implementation)"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    summary.add("data plane", done.stdout.strip() or done.stderr, failed=done.returncode != 0)


def tests(device: str, out: Path, summary: Summary) -> None:
    """Run the tests. A run in which no test ran on the device is a failure too."""
    report = out / "tests.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-W", "default", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    options += ["--timeout", "60", f"--junitxml={report}"]
    reason = run(["-m", "pytest", *options, *TESTS], TESTS_S)
    if not report.exists():
        summary.add("tests", f"no report: {reason}", failed=True)
        return
    outcomes = {_name(case): _outcome(case) for case in _cases(report)}
    counts = Counter(outcomes.values())
    ran = sum(outcomes[name] == "passed" for name in outcomes if _is_on(device, name))
    text = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    summary.add("tests", f"{text}; passed on {device}: {ran}", failed=bool(reason) or not ran)
    for name, outcome in outcomes.items():
        if outcome == "failed":
            summary.add(outcome, name, failed=True)


def _name(case: ET.Element) -> str:
    return f"{case.get('classname')}::{case.get('name')}"


def _is_on(device: str, name: str) -> bool:
    """Return whether the device is a parameter of the test."""
    return device in name.partition("[")[2].rstrip("]").split("-")


def _cases(report: Path) -> list[ET.Element]:
    return list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest wrote it


def _outcome(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def benchmark(device: str, out: Path, summary: Summary) -> None:
    report = out / "device_pool.json"
    report.unlink(missing_ok=True)
    options = ["--device", device, "--json", str(report.resolve()), *BENCHMARK[device]]
    reason = run(["benchmarks/device_pool.py", *options], BENCHMARK_S)
    if reason:
        summary.add("benchmark", reason, failed=True)
    if report.exists():
        for line in ratios(json.loads(report.read_text(encoding="utf-8"))):
            summary.add("ratio", line)


def ratios(report: dict[str, Any]) -> list[str]:
    """Return a line for each table of a report: our rate, and its ratio to each baseline."""
    return [
        f"{section['title']}: ours {_rate(section, name)}, {ratio:.2f} x {baseline}"
        for section in report["sections"]
        for name, by_baseline in section["ratios"].items()
        if name.startswith("ours")
        for baseline, ratio in by_baseline.items()
    ]


def _rate(section: dict[str, Any], name: str) -> str:
    return f"{section['work'] / statistics.median(section['seconds'][name]):.2f} {section['unit']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=sorted(BENCHMARK), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "gpu", metavar="FOLDER")
    options = parser.parse_args()
    if lacking := missing(MODULES):
        sys.exit(
            f"make gpu: {sys.executable} lacks {', '.join(lacking)}: install them, take another"
            " PYTHON, or put the folder that has them on PYTHONPATH"
        )
    began_s = time.monotonic()
    summary = Summary()
    machine(options.device, summary)
    options.out.mkdir(parents=True, exist_ok=True)
    data_plane(summary)
    tests(options.device, options.out.resolve(), summary)
    benchmark(options.device, options.out.resolve(), summary)
    summary.add("time", f"{time.monotonic() - began_s:.0f} s")
    summary.add("result", "FAILED" if summary.failed else "passed")
    text = "\n".join(summary.lines) + "\n"
    (options.out / "summary.txt").write_text(text, encoding="utf-8")
    print(f"\n{text}", end="")
    return int(summary.failed)


if __name__ == "__main__":
    sys.exit(main())

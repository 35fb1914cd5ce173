"""The version, the changelog and the release workflow agree."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml
from servers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
WORKFLOW: Any = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
PAGE = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
MAKEFILES = [(ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "maintain.mk")]


def steps() -> list[dict[str, Any]]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_the_newest_section_of_the_changelog_is_of_this_version() -> None:
    released = re.findall(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d{2}-\d{2}\)$", CHANGES, re.MULTILINE)

    assert PROJECT["version"] == released[0]


def test_every_section_of_the_changelog_is_a_version_or_unreleased() -> None:
    sections = re.findall(r"^## (.*)$", CHANGES, re.MULTILINE)

    assert [] == [
        one
        for one in sections
        if not re.fullmatch(r"Unreleased|\d+\.\d+\.\d+ \(\d{4}-\d{2}-\d{2}\)", one)
    ]


def test_the_workflow_runs_for_tags_of_versions_only() -> None:
    assert {"push": {"tags": ["v*"]}} == WORKFLOW[True]  # YAML 1.1 reads the key `on` as true


def test_nothing_is_published_before_every_other_job_has_passed() -> None:
    jobs = WORKFLOW["jobs"]

    assert set(jobs) - {"publish"} == set(jobs["publish"]["needs"])
    assert {"id-token": "write"} == jobs["publish"]["permissions"]


def test_actions_are_pinned_to_a_version() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]

    assert used
    assert [] == [one for one in used if not re.search(r"@(v\d+|release/v\d+)", one)]


def test_targets_that_are_named_exist() -> None:
    commands = "\n".join(step.get("run", "") for step in steps())
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", commands + PAGE))

    assert {"release-check", "check"} <= named
    assert [] == sorted(one for one in named if f"\n{one}:" not in "".join(MAKEFILES))


def test_the_help_of_the_makefile_fits_a_screen() -> None:
    assert len(re.findall(r"^[a-z0-9-]+:.*## ", MAKEFILES[0], re.MULTILINE)) <= 24

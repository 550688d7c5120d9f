"""Workflows call what exists, have the permissions that they need, and a release has the version of its tag."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lex_hf

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
# Of each workflow that publishes: the job that does, its permissions besides its identity, and its environment.
PUBLISHING: dict[str, tuple[str, dict[str, str], str]] = {
    "publish.yml": ("publish", {}, "pypi"),
    "site.yml": ("deploy", {"pages": "write"}, "github-pages"),
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in jobs(path).values() for step in job["steps"]]


def made(script: str) -> Iterator[str]:
    """Targets of make that a script calls, by itself and by the repository's own scripts."""
    for line in script.splitlines():
        words = line.split() or [""]
        if words[0] == "make":
            yield from (word for word in words[1:] if not word.startswith("-") and "=" not in word)
        elif "/" in words[0] and not line.startswith("#"):
            assert os.access(ROOT / words[0], os.X_OK), words[0]
            yield from made((ROOT / words[0]).read_text(encoding="utf-8"))


def test_they_are_all_here() -> None:
    assert [path.name for path in WORKFLOWS] == ["publish.yml", "site.yml", "tests.yml"]
    assert list(jobs(ROOT / ".github/workflows/publish.yml")) == ["build", "publish"]


@pytest.mark.parametrize(
    ("name", "targets"),
    [("publish.yml", {"dist"}), ("site.yml", {"docs"}), ("tests.yml", {"test", "floor-test"})],
)
def test_make_has_the_targets_that_they_call(name: str, targets: set[str]) -> None:
    path = ROOT / ".github/workflows" / name
    variants = [
        each for job in jobs(path).values() for each in job.get("strategy", {}).get("matrix", {}).get("include", [])
    ]
    scripts = [step.get("run", "") for step in steps(path)] + [each["command"] for each in variants]
    called = {target for script in scripts if script != "$COMMAND" for target in made(script)}
    assert called == targets
    assert called <= set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))


def test_targets_are_phony() -> None:
    """A folder of the same name, such as dist, would otherwise stand for the target."""
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert sorted(phony[1].split()) == sorted(re.findall(r"^([a-z-]+):(?!=)", MAKEFILE, re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_permissions(path: Path) -> None:
    """Jobs read the repository; those that publish show their identity, and run no code of the repository."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    given = {name: job.get("permissions", workflow["permissions"]) for name, job in workflow["jobs"].items()}
    assert workflow["permissions"] in ({}, {"contents": "read"})
    identity = [name for name, permissions in given.items() if "id-token" in permissions]
    assert identity == [PUBLISHING[path.name][0]] if path.name in PUBLISHING else not identity
    assert all(permissions == {"contents": "read"} for name, permissions in given.items() if name not in identity)
    for name in identity:
        job = workflow["jobs"][name]
        _, further, environment = PUBLISHING[path.name]
        assert (given[name], job["needs"]) == ({**further, "id-token": "write"}, "build")
        assert job["environment"] == environment or job["environment"]["name"] == environment
        assert all(set(step) <= {"uses", "with", "id"} and "uses" in step for step in job["steps"])
        assert not any("checkout" in step["uses"] for step in job["steps"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_nothing_leaks_and_actions_have_versions(path: Path) -> None:
    assert "secrets" not in path.read_text(encoding="utf-8")
    for step in steps(path):
        assert "${{" not in step.get("run", "")  # a name of a branch or tag would be part of the script
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v|release/v)\d+", step.get("uses", "a/b@v1"))
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize(
    ("tag", "fits"),
    [
        (f"v{lex_hf.__version__}", True),
        (lex_hf.__version__, False),
        (f"v{lex_hf.__version__}rc1", False),
        ("v", False),
    ],
)
def test_a_tag_must_be_the_version(tag: str, fits: bool) -> None:
    [script] = [step["run"] for step in steps(ROOT / ".github/workflows/publish.yml") if "TAG" in step.get("env", {})]
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TAG": tag}, capture_output=True, text=True)
    assert (done.returncode == 0) is fits, done.stderr
    assert fits or f"::error::The tag is {tag}, and the version of the package is {lex_hf.__version__}" in done.stdout

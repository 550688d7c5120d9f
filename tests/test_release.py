"""A release: what the source distribution and the wheel hold, and that all documents name its version."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
import yaml
from helpers.forks import LIBRARIES
from packaging.requirements import Requirement

import lex_hf

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"lex_hf-{lex_hf.__version__}"


def files_of_the_repository() -> set[str]:
    """Names of the files that git does not ignore."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("only git knows which files belong to the repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).is_file()}


def build(what: str, source: Path) -> None:
    """Call setuptools as `python -m build` does, in a process of its own, with what is installed; no network."""
    code = f"""
import sys
from setuptools import build_meta
build_meta.build_{what}("..")
assert "lex_hf" not in sys.modules  # the version was read, not imported
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, the wheel that is built from that, and both unpacked."""
    folder = tmp_path_factory.mktemp("release")
    for name in files_of_the_repository():
        copy = folder / "repository" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy)
    build("sdist", folder / "repository")
    with tarfile.open(folder / f"{NAME}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    build("wheel", folder / NAME)
    with zipfile.ZipFile(folder / f"{NAME}-py3-none-any.whl") as wheel:
        wheel.extractall(folder / "wheel")
    return folder


@pytest.fixture(scope="module")
def installed(built: Path) -> Distribution:
    [found] = distributions(path=[str(built / "wheel")])
    return found


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.processes
def test_the_source_distribution_holds_the_repository(built: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        held = {each.name.removeprefix(f"{NAME}/") for each in archive.getmembers() if each.isfile()}
    made = {name for name in held if name.startswith("src/lex_hf.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert held - made == files_of_the_repository()
    assert made <= held


@pytest.mark.processes
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    package = {name.removeprefix("src/") for name in files_of_the_repository() if name.startswith("src/")}
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt")
    assert names(built / "wheel") == package | {f"{NAME}.dist-info/{name}" for name in about}
    assert all(name.startswith("lex_hf/") for name in package)
    assert (built / "wheel" / f"{NAME}.dist-info/licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.processes
def test_metadata(installed: Distribution) -> None:
    about = installed.metadata
    assert (about["Name"], about["Version"]) == ("lex-hf", lex_hf.__version__)
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert about["Requires-Python"] == PROJECT["requires-python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert set(about.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    always = {each for each in map(Requirement, installed.requires or []) if "extra" not in str(each.marker)}
    assert always == set(map(Requirement, PROJECT["dependencies"]))
    assert [(each.group, each.name, each.value) for each in installed.entry_points] == [
        ("console_scripts", "lex-hf", "lex_hf.cli:main")
    ]


@pytest.mark.processes
def test_the_wheel_works(built: Path, tmp_path: Path) -> None:
    """All that a model needs is loaded from it, though the sources are installed, too."""
    code = """
import json, sys
import lex_hf, torch
config = lex_hf.LexConfig(
    vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, training_length=8
)
logits = lex_hf.LexForCausalLM(config)(torch.arange(10)[None]).logits
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "lex_hf"]
print(json.dumps([lex_hf.__version__, logits.shape, files]))
"""
    environment = {**os.environ, "PYTHONPATH": str(built / "wheel")}
    done = LIBRARIES.run("-c", code, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, shape, files = json.loads(done.stdout)
    assert (version, shape) == (lex_hf.__version__, [1, 10, 11])
    assert len(files) > 10
    assert [file for file in files if not Path(file).is_relative_to(built / "wheel")] == []
    done = LIBRARIES.run("-m", "lex_hf", "--version", env=environment, cwd=tmp_path)
    assert done.stdout == f"lex-hf {lex_hf.__version__}\n", done.stderr


def test_documents_name_the_version() -> None:
    """CITATION.cff repeats the version and the date of the newest release in CHANGELOG.md."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changes, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert releases[0] == (citation["version"], str(citation["date-released"]))
    assert lex_hf.__version__ == citation["version"]
    assert PROJECT["license"] == citation["license"]
    assert "version" not in PROJECT


@pytest.mark.parametrize("document", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_lead_to_files(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+?)\)", (ROOT / document).read_text(encoding="utf-8"))
    assert [link for link in links if not re.match(r"[a-z]+:", link) and not (ROOT / link).exists()] == []


def _unsafe(path: Path) -> Iterator[str]:
    """What SECURITY.md promises that the package does not do, where it stands in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported = {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            # To name an error of the library is not to load a file with it.
            imported = {str(node.module)} if {each.name for each in node.names} != {"UnpicklingError"} else set()
        else:
            imported = set()
        yield from (f"{path.name}:{name}" for name in imported & {"pickle", "dill", "joblib", "marshal", "shelve"})
        if isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {each.arg: ast.unparse(each.value) for each in node.keywords}
            if called in ("eval", "exec") or (called.endswith("torch.load") and options.get("weights_only") != "True"):
                yield f"{path.name}:{called}"


def test_no_file_runs_code_that_it_loads(tmp_path: Path) -> None:
    files = sorted((ROOT / "src").rglob("*.py"))
    assert [found for path in files for found in _unsafe(path)] == []
    (tmp_path / "some.py").write_text(
        "import numpy, pickle\nfrom dill import loads\nfrom pickle import UnpicklingError\nmodel.eval()\neval('1')\n"
        "torch.load(path)\ntorch.load(path, weights_only=False)\ntorch.load(path, weights_only=True)\n"
    )
    assert sorted(_unsafe(tmp_path / "some.py")) == [
        "some.py:dill",
        "some.py:eval",
        "some.py:pickle",
        "some.py:torch.load",
        "some.py:torch.load",
    ]

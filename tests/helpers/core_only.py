"""An environment with the packages that `pip install lex-hf` brings, made of those that are installed."""

import re
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(requirements: list[str]) -> dict[str, Distribution]:
    """Return the distributions that some requirements bring, with all that these bring, by name."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(each) for each in requirements]
    while waiting:
        requirement = waiting.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        marker = requirement.marker
        if name in found or (
            marker and not any(marker.evaluate({"extra": each}) for each in ("", *requirement.extras))
        ):
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # e.g. what a build of PyTorch for a CPU does without
            continue
        for each in map(Requirement, found[name].requires or []):
            if each.marker is None or any(each.marker.evaluate({"extra": part}) for part in ("", *requirement.extras)):
                waiting.append(each)
    return found


def link_packages(folder: Path, requirements: list[str]) -> None:
    """Fill a folder with links to what some requirements bring, for `sys.path`."""
    for each in required(requirements).values():
        for name in {file.parts[0] for file in each.files or [] if file.parts[0] != ".."}:
            link = folder / name
            if name != "__pycache__" and not link.exists():
                link.symlink_to(Path(str(each.locate_file(name))))

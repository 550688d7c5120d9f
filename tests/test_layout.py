"""The layout of the package: names that moved, and rooms."""

import ast
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import lex_hf

TESTS = Path(__file__).parent
SOURCE = Path(lex_hf.__file__).parent

# Rooms may import from those on earlier lines; the root's own modules from each other alone, and all from them.
ROOMS = (
    ("model",),
    ("rope",),
    ("data",),
    ("evaluation",),
    ("training",),
    ("convert", "hub", "inference"),
    ("app", "reproduce"),
    ("cli",),
)
ENTRANCES = ("lex_hf", "lex_hf.__main__")  # they may import from any room, and nothing imports them


def _modules() -> dict[str, Path]:
    """Modules of the package by name; the packages among them under the name of their folder."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(name: str, path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Modules of the package that a module names in an import, wherever it stands: in functions, under conditions."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, *filter(None, [node.module])]) if node.level else str(node.module)
            for each in node.names:
                inner = f"{base}.{each.name}"  # `from lex_hf.room import module` imports the module, not the room
                yield from (found for found in [inner if inner in modules else base] if found in modules)


def _graph() -> dict[str, set[str]]:
    modules = _modules()
    return {name: set(_imports(name, path, modules)) - {name} for name, path in modules.items()}


def _circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, at once or through others."""
    reached = {name: _reached(name, graph) for name in graph}
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def _room(name: str) -> str | None:
    """The room of a module, or `None` for those at the root."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and (SOURCE / parts[1]).is_dir() else None


def _may_import(name: str, other: str) -> bool:
    order = {room: level for level, rooms in enumerate(ROOMS, start=1) for room in rooms}
    room, theirs = _room(name), _room(other)
    if name in ENTRANCES or room == theirs:
        return other not in ENTRANCES or name in ENTRANCES
    return other not in ENTRANCES and order.get(theirs, 0) < order.get(room, 0)


def test_every_room_has_its_place() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/*.py")} == {room for rooms in ROOMS for room in rooms}


def test_imports_are_found_wherever_they_stand(tmp_path: Path) -> None:
    modules = dict.fromkeys(("lex_hf", "lex_hf.records", "lex_hf.data", "lex_hf.data.packing", "lex_hf.cli"), tmp_path)
    path = tmp_path / "some.py"
    path.write_text(
        "import json, lex_hf.cli\nfrom lex_hf.data import packing, pack\n"
        "if False:\n    from .. import records\ndef f():\n    from ..data.packing import x\n    from . import y\n"
    )
    found = sorted(_imports("lex_hf.training.some", path, modules))
    assert found == ["lex_hf.cli", "lex_hf.data", "lex_hf.data.packing", "lex_hf.data.packing", "lex_hf.records"]
    path = path.rename(tmp_path / "__init__.py")
    path.write_text("from .data import packing\nfrom . import records, __version__")
    assert sorted(_imports("lex_hf", path, modules)) == ["lex_hf", "lex_hf.data.packing", "lex_hf.records"]


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": {"f"}, "f": {"g"}, "g": {"e"}}
    assert _circles(graph) == [["b", "c"], ["e", "f", "g"]]
    assert _circles({"a": {"b"}, "b": set()}) == []


def test_no_imports_go_in_circles() -> None:
    graph = _graph()
    assert len(graph) > 50
    assert _circles(graph) == []


def test_rooms_import_from_earlier_ones() -> None:
    wrong = [f"{name} -> {other}" for name, others in _graph().items() for other in others]
    wrong = [each for each in wrong if not _may_import(*each.split(" -> "))]
    assert sorted(wrong) == []
    assert not _may_import("lex_hf.data.packing", "lex_hf.evaluation.loading")
    assert not _may_import("lex_hf.hub.card", "lex_hf.convert.gpt2")
    assert not _may_import("lex_hf.records", "lex_hf.data.packing")
    assert not _may_import("lex_hf.cli.commands", "lex_hf")
    assert _may_import("lex_hf.cli.commands", "lex_hf.records")


def test_at_most_six_files_are_at_the_root() -> None:
    files = sorted(path.name for path in SOURCE.iterdir() if path.is_file())
    assert len(files) <= 6, files


def test_no_file_is_longer_than_500_lines() -> None:
    files = [*SOURCE.rglob("*.py"), *TESTS.rglob("*.py")]
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > 500} == {}


@pytest.mark.parametrize("name", ["perplexity", "comparison", "tokenization", "context_parallel", "modeling_lex"])
def test_modules_that_moved_are_found_under_their_old_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"lex_hf.{name}", raising=False)
    monkeypatch.delitem(vars(lex_hf), name, raising=False)
    with pytest.warns(DeprecationWarning, match=rf"lex_hf.{name} is now lex_hf"):
        old = importlib.import_module(f"lex_hf.{name}")
    assert old is sys.modules[old.__name__]
    assert old.__name__ != f"lex_hf.{name}"
    assert old.__spec__ is not None
    assert old.__spec__.name == old.__name__


def test_a_moved_module_warns_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lex_hf.perplexity", raising=False)
    monkeypatch.delitem(vars(lex_hf), "perplexity", raising=False)
    with pytest.warns(DeprecationWarning, match="lex_hf.perplexity is now lex_hf.evaluation.perplexity") as warned:
        exec(compile("import lex_hf\nfrom lex_hf.perplexity import compute_perplexity", "<script>", "exec"), {})
    assert [(each.filename, each.lineno) for each in warned] == [("<script>", 2)]


def test_unknown_modules_and_names_are_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"lex_hf\.nothing"):
        importlib.import_module("lex_hf.nothing")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        importlib.import_module("lex_hf.data").nothing  # noqa: B018

"""What the site has beside the pages of `docs`: pages and pictures from elsewhere in the repository."""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

import yaml
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
_COPIED = ("CHANGELOG.md", "benchmarks/README.md", "benchmarks/*.png", "notebooks/**/*.png", "notebooks/*/**/*.md")
_PACKAGE = ROOT / "src/lex_hf"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]*)(#[^)\s]*)?\)")


def on_pre_build(config: Any) -> None:
    """Check that the reference has every name that the package exports."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs/api").glob("*.md")))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    missing = sorted({f"lex_hf.{name}" for name in _exported(_PACKAGE / "__init__.py")} - shown)
    for room in ("data", "hub", "training"):
        names = _exported(_PACKAGE / room / "__init__.py").items()
        missing += sorted({f"lex_hf.{room}.{module}.{name}" for name, module in names} - shown)
    if missing:
        raise PluginError(f"No page of docs/api has these: {', '.join(missing)}.")


def _exported(path: Path) -> dict[str, str]:
    """Exports of a package, by name the module: the dictionary of names in its file, which is read, not run."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Assign(targets=[ast.Name(id="_NAMES")], value=value):
                return dict(ast.literal_eval(value))
            case ast.Call(func=ast.Name(id="exports"), args=[_, ast.Dict() as value]):
                return dict(ast.literal_eval(value))
            case ast.Call(
                func=ast.Name(id="exports"),
                args=[_, ast.Call(func=ast.Attribute(attr="fromkeys"), args=[names, module])],
            ):
                return dict.fromkeys(ast.literal_eval(names), ast.literal_eval(module))
    raise PluginError(f"{path} exports no names.")


def on_files(files: Files, config: Any) -> Files:
    """Add pages and pictures of other folders, under their paths in the repository."""
    for pattern in _COPIED:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, "recipes.md", content=_recipes()))
    files.append(File.generated(config, "reports.md", content=_reports()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Turn links between files of the repository into links of the site."""
    return _LINK.sub(lambda found: _linked(found, page.file, files), markdown)


def _linked(found: re.Match[str], page: File, files: Files) -> str:
    """Return a link to a page or picture of the site; of a file that is not on it, its name."""
    is_picture, text, target, anchor = found.groups()
    if not target:
        return found[0]
    in_repository = posixpath.normpath(posixpath.join(posixpath.dirname(_source(page)), target))
    on_site = in_repository.removeprefix("docs/")
    if on_site == "README.md":
        on_site = "index.md"
    if files.get_file_from_path(on_site) is None:
        if not (ROOT / in_repository).exists():
            raise PluginError(f"{_source(page)} links to {target}, which is not there.")
        return f"{text} (`{in_repository}`)" if text != in_repository else f"`{in_repository}`"
    relative = posixpath.relpath(on_site, posixpath.dirname(page.src_uri) or ".")
    link = f"{is_picture}[{text}]({relative}{anchor or ''})"
    return f"[{link}]({relative})" if is_picture and relative.endswith(".png") else link  # a plot opens in full size


def _source(page: File) -> str:
    """Path of a page in the repository."""
    return page.src_uri if page.generated_by is not None else f"docs/{page.src_uri}"


def _recipes() -> str:
    """The recipes that come with the package."""
    blocks = [
        "# Recipes",
        "`lex-hf train NAME FILES` takes one of these, `--set field=value` changes a field, and a file of your own "
        "may have any of them.",
    ]
    for path in sorted((_PACKAGE / "training/presets").glob("*.yaml")):
        text = path.read_text(encoding="utf-8").rstrip()
        yaml.safe_load(text)
        blocks.append(f"## {path.stem}\n\n```yaml\n{text}\n```")
    return "\n\n".join(blocks) + "\n"


def _reports() -> str:
    """Links to all reports, those about others first."""
    notebooks = ROOT / "notebooks"
    paths = sorted(notebooks.glob("*/**/*.md"), key=lambda path: (path.name == "report.md", path))
    lines = []
    for path in paths:
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        place = path.parent.relative_to(notebooks).as_posix()
        lines.append(f"- [{title}]({path.relative_to(ROOT).as_posix()}) ({place})")
    return "# Reports\n\nWhat `lex-hf reproduce` made, each from its record:\n\n" + "\n".join(lines) + "\n"

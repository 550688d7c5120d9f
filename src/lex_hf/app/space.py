"""The page as a Space of the Hub: a folder that is uploaded as it is."""

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from lex_hf.errors import explained
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.records import check_file, check_folder, check_new_folder, content_hash, versions, whole_file, whole_folder

GRADIO = "6.31.0"
"""The version that a Space installs."""

_PYTHON = "3.11"
_WEIGHTS = "model"  # the folder in a Space of a model that is a folder here
_DESCRIPTION = "Long texts, read in two ways and written without an end"  # at most 60 characters
_MARK = re.compile(r"^# Written by lex-hf space \((\w{16})\)\.\n", re.MULTILINE)

_APP = """\
{mark}from lex_hf.app.server import serve_page

serve_page({model!r}, name={name!r})
"""
_REQUIREMENTS = "{mark}lex-hf[app]=={version}\n"
_CARD = """\
---
{mark}{front}---

# {title}

The page of lex_hf for the model {shown}. It reads a text in two settings beside each other (full attention, a sliding
window, blocks, blocks with sinks), and shows the loss by position, the bytes of keys and values, and tokens per
second. And it continues a text without an end, in constant memory where the setting allows it.

The same page on a machine of your own: `pip install 'lex-hf[app]'` and `lex-hf app MODEL`.
"""


def write_space(model: str, folder: str | Path, *, title: str | None = None) -> list[Path]:
    """Write the folder of a Space that serves the page of a model.

    Args:
        model: Hub id of a causal language model with its tokenizer, which the Space downloads; or a folder, which is
            saved in that of the Space.
        folder: Folder of the Space: new, or one whose files were written by this function and not changed since.
        title: Title of the Space; the name of the model by default.

    Returns:
        The files and folders that were written. Nothing is written if one cannot be.

    Raises:
        ValueError: If there is no such model, the title is empty, or a file cannot be written or must not be
            replaced.
    """
    folder, is_here = Path(folder), bool(model) and Path(model).is_dir()
    name = Path(model).resolve().name if is_here else model
    if title is not None and not title.strip():
        raise ValueError(f"title = {title!r}: give the Space a name, or leave the title out.")
    texts = {folder / path: text for path, text in _texts(model, name, title or name, is_here).items()}
    _check(folder, texts, is_here)
    loaded = load_for_evaluation(model, device="cpu") if is_here else None
    if loaded is None:
        with explained(model, "the configuration of a model (config.json)"):
            AutoConfig.from_pretrained(model)
    _write(folder, texts, loaded)
    return [*texts, *([folder / _WEIGHTS] if is_here else [])]


def _check(folder: Path, texts: dict[Path, str], is_here: bool) -> None:
    check_folder(folder, "FOLDER")
    for path in texts if folder.is_dir() else ():
        check_file(path, "FOLDER:")
        if path.exists() and not is_ours(path.read_bytes()):
            raise ValueError(
                f"{path} was not written by lex-hf space, or was changed since: move it away, or choose another "
                "folder."
            )
    if is_here:
        check_new_folder(folder / _WEIGHTS, "FOLDER:")


def _write(
    folder: Path, texts: dict[Path, str], loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as whole:  # all are written before the first one gets its name
        for path, text in texts.items():
            whole.enter_context(whole_file(path)).write_text(text, encoding="utf-8", newline="")
        if loaded is not None:
            place = whole.enter_context(whole_folder(folder / _WEIGHTS))
            for each in loaded:
                each.save_pretrained(place)


def _texts(model: str, name: str, title: str, is_here: bool) -> dict[str, str]:
    """Return the text of each file by its name."""
    front: dict[str, Any] = {
        "title": title,
        "emoji": "\N{OPEN BOOK}",
        "colorFrom": "blue",
        "colorTo": "yellow",
        "sdk": "gradio",
        "sdk_version": GRADIO,
        "python_version": _PYTHON,
        "app_file": "app.py",
        "short_description": _DESCRIPTION,
        **({} if is_here else {"models": [model]}),
    }
    header = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    shown = name if is_here else f"[{model}](https://huggingface.co/{model})"
    source = _WEIGHTS if is_here else model
    return {
        "app.py": _marked(_APP, model=source, name=name),
        "requirements.txt": _marked(_REQUIREMENTS, version=versions("lex-hf")["lex-hf"]),
        "README.md": _marked(_CARD, front=header, title=title, shown=shown),
    }


def _marked(template: str, **values: str) -> str:
    """Fill in a template; its mark holds a hash of the rest."""
    rest = template.format(mark="", **values)
    return template.format(mark=f"# Written by lex-hf space ({_hash(rest)}).\n", **values)


def is_ours(content: bytes) -> bool:
    """Return whether a file is as [`write_space`] wrote it, with whatever model, title and version."""
    text = content.decode("utf-8", "replace")
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _hash(text.replace(mark[0], "", 1))


def _hash(text: str) -> str:
    return content_hash([text.encode("utf-8")])

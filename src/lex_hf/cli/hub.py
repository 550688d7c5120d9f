"""The Hub: push, card."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.filesize import decimal
from rich.table import Column

from lex_hf.cli.options import LARGEST_SEED, Json
from lex_hf.cli.printing import new_table, number, print_json, session
from lex_hf.records import command


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved model with its tokenizer and model card.")],
    repo_id: Annotated[str, typer.Argument(help="Repository, as user/name; it is made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch, made if it does not exist; main by default.")
    ] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload model",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be sent and what not.")] = False,
    as_json: Json = False,
) -> None:
    """Push a saved model to the Hub in one commit: weights, code, tokenizer, card, pictures.

    Checkpoints, training states, logs, pickles and hidden files stay. Log in first with `hf auth login`.
    """
    from lex_hf.hub import push as pushing

    with session(as_json) as console, pushing.plain_errors(repo_id):
        if dry_run:
            files = pushing.examine_folder(folder)
            if not as_json:
                console.print(_files_table(f"{folder} to {repo_id}", files))
            pushing.check_push(folder, repo_id, revision=revision, create_pr=create_pr)
            result: dict[str, Any] = {"files": [vars(file) for file in files]}
        else:
            commit = pushing.push_folder(
                folder, repo_id, private=private, revision=revision, message=message, create_pr=create_pr
            )
            result = {"commit": commit.oid, "url": commit.pr_url or commit.commit_url}
            console.print(f"Pushed: {result['url']}", soft_wrap=True)
    if as_json:
        print_json(result)


def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    about: Annotated[Path | None, typer.Option(help="YAML with what only the maker knows (`About`).")] = None,
    test: Annotated[
        list[str] | None, typer.Option(help="CORPUS=FILE to measure it on; several times, also for one corpus.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in a segment; several times.")] = None,
    characters: Annotated[int | None, typer.Option(min=1, help="Characters from the beginning of each text.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the samples.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a README.md that this command did not write.")
    ] = False,
) -> None:
    """Write the model card of a model from its record; with --about and --test, measure it first."""
    from lex_hf.hub import card as cards

    with session() as console:
        if (about is None) != (not test):
            raise ValueError("--about and --test belong together: what the maker knows, and texts to measure on.")
        if about is not None:
            cards.measure(
                folder,
                cards.About.read(about),
                _corpora(test or []),
                length or [],
                characters=characters,
                command=command(),
                seed=seed,
                overwrite=overwrite,
            )
        console.print(f"The card is in {cards.write_card(folder, overwrite=overwrite)}", soft_wrap=True)


def _corpora(pairs: list[str]) -> dict[str, list[str]]:
    """Read CORPUS=FILE, several times."""
    corpora: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            raise ValueError(f"--test {pair}: it must be CORPUS=FILE.")
        corpora.setdefault(name, []).append(file)
    return corpora


def _files_table(title: str, files: list[Any]) -> Group:
    """Return a table of what a push sends, with sizes, and what stays, with the reasons."""
    sent = [file for file in files if file.sent]
    total = decimal(sum(file.size for file in sent))
    columns = (Column("file", overflow="fold"), number("size"), Column("sent", no_wrap=True), "what, or why not")
    rows = ((file.path, decimal(file.size), "yes" if file.sent else "no", file.what) for file in files)
    return new_table(title, columns, rows, caption=f"{len(sent)} files, {total}, would be sent; the rest stays.")

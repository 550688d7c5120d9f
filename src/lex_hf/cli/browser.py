"""The page in the browser: app, space."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lex_hf.cli import options
from lex_hf.cli.options import MOST, Device, Dtype, Model, Trust, Weights
from lex_hf.cli.printing import session


def app(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port; by default the first free one from 7860 on.")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    training_length: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens that a model that is not LEX was trained to read; what its configuration says by default.",
        ),
    ] = None,
    max_characters: Annotated[int, typer.Option(min=1, max=MOST, help="Characters of a text, at most.")] = 1_000_000,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
) -> None:
    """Serve a page in the browser that reads texts in two ways beside each other, and writes without an end.

    Nothing is loaded from elsewhere. Ctrl-C ends it. Needs pip install 'lex-hf[app]'.
    """
    from lex_hf.app.server import serve_page

    with session() as console:
        loading = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
        serve_page(
            model,
            host=host,
            port=port,
            opens_browser=open_browser,
            training_length=training_length,
            most_characters=max_characters,
            report=partial(console.print, soft_wrap=True),
            **loading | options.packing(weights, device),
        )


def space(
    model: Annotated[str, typer.Argument(help="Hub id of a model with its tokenizer, or a folder, which is copied.")],
    folder: Annotated[Path, typer.Argument(help="Folder of the Space, new, or one that this command wrote.")],
    title: Annotated[str | None, typer.Option(help="Title of the Space; the name of the model by default.")] = None,
) -> None:
    """Write the page as a Space of the Hub: app.py, requirements.txt and README.md.

    Files that it did not write, or that were changed since, are not replaced. Upload it with
    `hf upload USER/NAME FOLDER --repo-type space`.
    """
    from lex_hf.app.space import write_space

    with session() as console:
        named = None if title is None else options.typed(title, "--title")
        for path in write_space(model, folder, title=named):
            console.print(path, soft_wrap=True)

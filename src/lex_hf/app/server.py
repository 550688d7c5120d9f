"""The page on a server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from transformers.utils import logging

from lex_hf.app.desk import Desk
from lex_hf.app.page import build
from lex_hf.app.texts import MOST_CHARACTERS
from lex_hf.evaluation.loading import load_for_evaluation

logger = logging.get_logger(__name__)

_FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "Menlo", "Consolas", "monospace"]
_STYLE = Path(__file__).with_name("page.css")
_MOST_FILE_BYTES = 64 * 2**20  # larger ones do not leave the browser; the limit of texts is in `texts.py`
# Nothing comes from elsewhere, and the browser sees to it. Gradio has scripts and styles in the page itself.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:"
)


def serve_page(
    model: str,
    *,
    host: str | None = None,
    port: int | None = None,
    name: str | None = None,
    training_length: int | None = None,
    most_characters: int = MOST_CHARACTERS,
    opens_browser: bool = False,
    report: Callable[[str], object] = logger.warning,
    **loading: Any,
) -> None:
    """Serve the page of a model, until the process is told to stop.

    Args:
        model: Folder or Hub id of a causal language model with its tokenizer.
        host: Address to listen on; this machine alone by default, or what `GRADIO_SERVER_NAME` says, as in a Space.
        port: Port to listen on; by default the first free one from 7860 on, or `GRADIO_SERVER_PORT`.
        name: Name of the model on the page; by default that of the folder, or the Hub id.
        training_length: Number of tokens that a model that is not LEX was trained to read; by default what its
            configuration says.
        most_characters: Characters of a text, at most.
        opens_browser: Whether a browser is opened.
        report: Called with a line that says where the page is.
        loading: Options of [`lex_hf.evaluation.loading.load_for_evaluation`].

    Raises:
        OSError: If the port is taken.
        ValueError: If the model is missing, lacks weights, or an option is impossible: before the server starts.
    """
    blocks = load_page(model, name=name, training_length=training_length, most_characters=most_characters, **loading)
    address = launch(blocks, host=host, port=port, opens_browser=opens_browser)
    report(f"The page is at {address} and Ctrl-C ends it.")
    blocks.block_thread()


def load_page(
    model: str,
    *,
    name: str | None = None,
    training_length: int | None = None,
    most_characters: int = MOST_CHARACTERS,
    **loading: Any,
) -> gr.Blocks:
    """Load a model, and return its page; see [`serve_page`]."""
    network, tokenizer = load_for_evaluation(model, **loading)
    desk = Desk(network, tokenizer, training_length=training_length, most_characters=most_characters)
    return build(desk, name or (Path(model).resolve().name if Path(model).is_dir() else model))


def launch(blocks: gr.Blocks, *, host: str | None = None, port: int | None = None, opens_browser: bool = False) -> str:
    """Start the server of a page, in threads of its own, and return its address; see [`serve_page`]."""
    _, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        inbrowser=opens_browser,
        prevent_thread_lock=True,
        quiet=True,  # it would advise to share the page through its makers' servers
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        mcp_server=False,
        footer_links=[],
        max_file_size=_MOST_FILE_BYTES,
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=_FONTS, font_mono=_MONO),
        head=f"<style>{_STYLE.read_text(encoding='utf-8')}</style>",  # Gradio rewrites what it takes as css_paths
        app_kwargs={"middleware": [Middleware(OwnSourcesOnly)]},
    )
    return str(address)


class OwnSourcesOnly:
    """Middleware that tells browsers to load nothing from elsewhere.

    Args:
        app: The application behind it.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", _POLICY.encode())]
            await send(message)

        await self._app(scope, receive, sending)

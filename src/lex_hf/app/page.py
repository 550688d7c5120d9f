"""The page: components of Gradio, and what happens when they are used."""

from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import Any

import gradio as gr

from lex_hf.app import drawing
from lex_hf.app.desk import Desk
from lex_hf.app.drawing import Card, Curve, Picture
from lex_hf.app.pace import now_and_then
from lex_hf.app.reading import Progress, by_position
from lex_hf.app.settings import OWN
from lex_hf.app.texts import example, text_of_file
from lex_hf.app.writing import Sampling, Written

PEOPLE = 16  # who read, and as many who write, at once; others wait
_POINTS = 64  # of a curve
_SECONDS = 0.25  # between two pictures of a page
_STYLES = ("first", "second")
_KEEP = 3600  # seconds for which files that were opened are kept
_WIDTH = 220  # pixels of a choice or a slider at least: on a phone, each has a row
_TEXT_FILES = [".txt", ".md", ".rst", ".py", "text"]


class Page:
    """What happens on a page of a model.

    Args:
        desk: The model.
        name: Its name.
    """

    def __init__(self, desk: Desk, name: str) -> None:
        self._desk, self._name = desk, name

    def header(self) -> str:
        """Return the name of the model, and what it is."""
        length = self._desk.settings.training_length
        trained = f", trained on texts of {length:,} tokens" if length else ""
        described = f"{_count(self._desk.parameters)} parameters, {self._desk.layers} layers{trained}."
        return f'<div class="title"><h1>{escape(self._name)}</h1><p>{described}</p></div>'

    def read(self, text: str, first: str, second: str) -> Iterator[tuple[str, str]]:
        """Read a text in two settings.

        Yields:
            The chart of losses, and the figures of both.
        """
        with in_words():
            states = self._desk.read(text, (first, second))
        for state in now_and_then(states, _SECONDS):
            yield self._losses(state), self._readers((first, second), state)

    def _losses(self, states: tuple[Progress, ...]) -> str:
        curves = [Curve(by_position(state, _POINTS), style) for state, style in zip(states, _STYLES, strict=True)]
        length = self._desk.settings.training_length
        return drawing.chart(
            curves,
            max(1, states[0].total),
            title="Loss by position, in nats per token",
            xlabel="Tokens read",
            mark=(length, "training length") if length else None,
        )

    def _readers(self, names: tuple[str, str], states: tuple[Progress, ...]) -> str:
        titles = self._desk.settings.titles
        return drawing.cards(
            [
                Card(
                    title=titles[name],
                    subtitle=self._desk.settings.open(name).description,
                    figures=[
                        ("tokens read", _part(len(state.nll), state.total)),
                        ("mean loss", drawing.NOTHING if state.loss is None else f"{state.loss:.3f}"),
                        ("cache", drawing.size(state.cache_bytes)),
                        ("tokens a second", drawing.rate(state.tokens_per_second)),
                    ],
                    share=len(state.nll) / state.total,
                    problem=state.problem,
                    style=style,
                )
                for name, state, style in zip(names, states, _STYLES, strict=True)
            ]
        )

    def write(self, text: str, name: str, temperature: float, top_p: float) -> Iterator[tuple[str, str, str]]:
        """Continue a text.

        Yields:
            What was written, the figures, and the chart of the memory.
        """
        with in_words():
            states = self._desk.write(text, name, Sampling(temperature, top_p))
        for state in now_and_then(states, _SECONDS):
            yield drawing.text(state.text), self._writer(name, state), self._memory(state)

    def _writer(self, name: str, state: Written) -> str:
        is_reading = state.read < state.total
        card = Card(
            title=self._desk.settings.titles[name],
            subtitle=self._desk.settings.open(name).description,
            figures=[
                ("tokens read", _part(state.read, state.total)),
                ("written", f"{state.tokens:,}"),
                ("cache", drawing.size(state.cache_bytes)),
                ("tokens a second", drawing.rate(state.tokens_per_second)),
            ],
            share=state.read / state.total if is_reading else None,
            problem=state.problem,
        )
        return drawing.cards([card])

    def _memory(self, state: Written) -> str:
        end = max([1, *(tokens for tokens, _ in state.history)])
        return drawing.chart(
            [Curve(state.history, "first")],
            end,
            title="Keys and values in the cache",
            xlabel="Tokens read and written",
            is_bytes=True,
        )

    def patterns(self, first: str, second: str, layer: int) -> str:
        """Draw which keys the queries of a layer, counted from 1, see in two settings, or say why not."""
        return drawing.patterns(
            [self._picture(name, int(layer) - 1, style) for name, style in zip((first, second), _STYLES, strict=True)]
        )

    def _picture(self, name: str, layer: int, style: str) -> Picture:
        title = self._desk.settings.titles[name]
        try:
            found = self._desk.pattern(name, layer)
        except ValueError as error:
            return Picture(title, None, str(error), style)
        return Picture(f"{title}: {found.description}", found.seen, style=style)

    def open_file(self, path: str) -> str:
        """Return the text of a file."""
        with in_words():
            return text_of_file(path, self._desk.most_characters)


@contextmanager
def in_words() -> Iterator[None]:
    """Show what is wrong with what was given as a message on the page."""
    try:
        yield
    except ValueError as error:
        raise gr.Error(str(error), duration=None, print_exception=False) from error


def build(desk: Desk, name: str) -> gr.Blocks:
    """Return the page of a model.

    Args:
        desk: The model.
        name: Its name, which the page shows.
    """
    page = Page(desk, name)
    with gr.Blocks(title=f"{name} · lex_hf", analytics_enabled=False, delete_cache=(_KEEP, _KEEP)) as blocks:
        gr.HTML(page.header())
        text = gr.Textbox(
            label="Text",
            lines=7,
            max_lines=14,
            placeholder="Type or paste a text, open a file, or take the example.",
            elem_id="text",
        )
        with gr.Row():
            opening = gr.UploadButton(
                "Open a text file", min_width=120, file_types=_TEXT_FILES, size="sm", elem_id="open"
            )
            taking = gr.Button("Take an example", min_width=120, size="sm", elem_id="example")
        opening.upload(page.open_file, opening, text, **_LIGHT)
        taking.click(example, None, text, **_LIGHT)
        with gr.Tabs():
            with gr.Tab("Read"):
                _reading(page, desk, text, blocks)
            with gr.Tab("Write"):
                _writing(page, desk, text)
    return blocks


_LIGHT: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
_HEAVY: dict[str, Any] = {**_LIGHT, "concurrency_limit": PEOPLE}


def _reading(page: Page, desk: Desk, text: gr.Textbox, blocks: gr.Blocks) -> None:
    choices = [(title, name) for name, title in desk.settings.titles.items()]
    other = OWN if OWN in desk.settings.titles else "full"
    with gr.Row():
        first = gr.Dropdown(choices, value="blockwise", label="First setting", min_width=_WIDTH, elem_id="first")
        second = gr.Dropdown(choices, value=other, label="Second setting", min_width=_WIDTH, elem_id="second")
    with gr.Row():
        start = gr.Button("Read", min_width=120, variant="primary", elem_id="read")
        stop = gr.Button("Stop", min_width=120, elem_id="stop-reading")
    losses = gr.HTML(elem_id="losses")
    readers = gr.HTML(elem_id="readers")
    reading = start.click(page.read, [text, first, second], [losses, readers], **_HEAVY)
    stop.click(None, None, None, cancels=[reading], **_LIGHT)
    with gr.Accordion("Which keys each query sees", open=True):
        layer = gr.Slider(
            1, max(2, desk.layers), value=1, step=1, label="Layer", visible=desk.layers > 1, elem_id="layer"
        )
        drawn = gr.HTML(elem_id="patterns")
    gr.on(
        [blocks.load, first.change, second.change, layer.change],
        page.patterns,
        [first, second, layer],
        drawn,
        trigger_mode="always_last",
        **_LIGHT,
    )


def _writing(page: Page, desk: Desk, text: gr.Textbox) -> None:
    choices, usual = [(title, name) for name, title in desk.settings.titles.items()], Sampling()
    with gr.Row():
        setting = gr.Dropdown(choices, value="blockwise", label="Setting", min_width=_WIDTH, elem_id="setting")
        temperature = gr.Slider(
            0,
            2,
            value=usual.temperature,
            step=0.05,
            label="Temperature",
            info="0: the most probable token",
            min_width=_WIDTH,
            elem_id="temperature",
        )
        top_p = gr.Slider(0.05, 1, value=usual.top_p, step=0.05, label="Top-p", min_width=_WIDTH, info="1: any token")
    with gr.Row():
        start = gr.Button("Write", min_width=120, variant="primary", elem_id="write")
        stop = gr.Button("Stop", min_width=120, elem_id="stop-writing")
    written = gr.HTML(elem_id="written")
    writer = gr.HTML(elem_id="writer")
    memory = gr.HTML(elem_id="memory")
    writing = start.click(page.write, [text, setting, temperature, top_p], [written, writer, memory], **_HEAVY)
    stop.click(None, None, None, cancels=[writing], **_LIGHT)


def _part(count: int, total: int) -> str:
    return f"{count:,}" if count == total else f"{count:,} of {total:,}"


def _count(number: int) -> str:
    """Return a number in words, in two digits or more."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.1f} {word}"
    return f"{number:,}"

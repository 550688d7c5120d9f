"""Styles of curves: the same system has the same colour, marker and dash in all pictures.

Colour and marker say which positions, or which way to read, a system has; the dash says how far it sees. Colours are
those of Okabe and Ito's palette, which stay apart for colour-blind readers, without its yellow, which is too light for
lines; markers and dashes tell curves apart in black and white.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from typing import Any, NamedTuple

_BLUE, _VERMILLION, _GREEN, _PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
_ORANGE, _SKY, _BLACK, _GREY = "#E69F00", "#56B4E9", "#000000", "#7F7F7F"
_COLOURS = (_BLUE, _VERMILLION, _GREEN, _PURPLE, _ORANGE, _SKY, _BLACK, _GREY)
_MARKERS = "os^Dv<P>X*dph"

_Dash = str | tuple[int, tuple[int, ...]]
_SOLID, _LONG, _DOTTED, _DASHES_AND_DOTS = "-", (0, (6, 2)), (0, (1, 1)), (0, (5, 1, 1, 1))
_TWO_DOTS, _SHORT = (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1))

# Colour and marker by part of a name, the parts that say most first: a Llama in blocks is drawn as blocks are.
_LOOKS: Mapping[str, tuple[str, str]] = {
    "from layer 1": (_PURPLE, "o"),
    "1 full in 2": (_GREEN, "s"),
    "1 full in 4": (_ORANGE, "D"),
    "1 full in 8": (_SKY, "v"),
    "xpos": (_BLUE, "o"),
    "rope": (_VERMILLION, "s"),
    "alibi": (_GREEN, "^"),
    "t5": (_PURPLE, "D"),
    "kerple": (_ORANGE, "v"),
    "sandwich": (_SKY, "P"),
    "smoothed sandwich": (_SKY, "*"),
    "sinusoidal": (_BLACK, "X"),
    "learned": (_BLACK, "<"),
    "none": (_GREY, ">"),
    "shaw": (_PURPLE, "d"),
    "without rotation": (_GREY, "D"),
    "scalar decay": (_SKY, "d"),
    "yarn": (_SKY, "p"),
    "dynamic": (_ORANGE, "h"),
    "linear": (_BLACK, "d"),
    "linear llama": (_GREY, "d"),
    "self-extend": (_PURPLE, "p"),
    "dual chunk": (_GREY, "X"),
    "gpt neox": (_PURPLE, "h"),
    "dense mask": (_ORANGE, "p"),
    "blockwise": (_BLUE, "h"),
    "sliding": (_GREEN, "p"),
    "full": (_VERMILLION, "s"),  # the rotary positions of a model that is read as it is
}
_READINGS: Mapping[str, _Dash] = {
    "log scaling": _DASHES_AND_DOTS,
    "yarn in these": _DASHES_AND_DOTS,
    "sinks": _DASHES_AND_DOTS,
    "yarn": _DOTTED,
    "blockwise": _LONG,
    "sliding": _DOTTED,
    "smoothed sandwich": _DASHES_AND_DOTS,  # beside Sandwich, where lines have no markers
    "full": _SOLID,
}
_UNKNOWN_READING = _SHORT
# Other names of the same: those of the papers, of configurations, of reports.
_ALIASES: Mapping[str, str] = {
    "lex": "xpos + blockwise",
    "lex transformer": "xpos + blockwise",
    "lex without bca": "xpos",
    "roformer": "rope",
    "rotary": "rope",
    "transformer": "sinusoidal",
    "absolute": "sinusoidal",
    "w/o rotation": "without rotation + blockwise",
    "scalar ζ": "scalar decay + blockwise",
    "ζ = 0": "rope + blockwise",
    "smoothed": "smoothed sandwich",
    "no positions": "none",
    "bca": "blockwise",
    "blocks": "blockwise",
    "blockwise llama": "blockwise",
    "linear scaling": "linear",
    "dynamic ntk": "dynamic",
    "streamingllm": "sliding + sinks",
    "sliding window": "sliding",
    "mistral": "sliding",
    "full attention": "full",
    "unchanged": "full",
    "llama": "full",
}


class Style(NamedTuple):
    """How a curve is drawn: keyword arguments of matplotlib's `plot`."""

    color: str
    marker: str
    linestyle: _Dash


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the keyword arguments with which matplotlib draws each system, all different as far as styles go.

    A name that the table knows has the style of the table. Other names, and a second name for one style, have what no
    known system has, in their order, in colours of their own as long as there are any.

    Args:
        names: Names of the systems of one picture.
    """
    names = list(names)
    chosen: dict[str, Style] = {}
    for name in names:
        style = _known(name)
        if style is not None and style not in chosen.values():
            chosen[name] = style
    for name in names:
        if name not in chosen:
            chosen[name] = _free(name, chosen.values())
    return {name: chosen[name]._asdict() for name in names}


def is_lex(name: str) -> bool:
    """Return whether a name is that of LEX: xPos with blockwise causal attention."""
    return set(_parts(name)) == {"xpos", "blockwise"}


def _known(name: str) -> Style | None:
    parts = _parts(name)
    look = next((look for part, look in _LOOKS.items() if part in parts), None)
    if look is None:
        return None
    dash = next((dash for part, dash in _READINGS.items() if part in parts), None)
    is_plain = all(part in _LOOKS for part in parts)
    return Style(*look, dash or (_SOLID if is_plain else _UNKNOWN_READING))


def _parts(name: str) -> list[str]:
    """Return what a name consists of, by the names of the table."""
    written = re.split(r", | \+ ", name.casefold().replace("_", " "))
    return [part for each in written for part in _ALIASES.get(each, each).split(" + ")]


def _free(name: str, taken: Iterable[Style]) -> Style:
    """Return a style that is not taken: for a known system another dash, else what the table does not hold."""
    taken, known = set(taken), _known(name)
    dashes = (_SHORT, _TWO_DOTS, _DASHES_AND_DOTS, _DOTTED, _LONG)
    variants = [known._replace(linestyle=dash) for dash in dashes] if known is not None else []
    spare = list(_spare())
    colours = {style.color for style in taken}
    fresh = [style for style in spare if style.color not in colours]
    every = chain(variants, fresh, spare)
    return next((style for style in every if style not in taken), spare[len(taken) % len(spare)])


def _spare() -> Iterator[Style]:
    """Styles that no system of the table has; neighbours differ in colour, marker and dash."""
    looks = set(_LOOKS.values())
    dashes = (_SOLID, _LONG, _DASHES_AND_DOTS, _DOTTED, _TWO_DOTS, _SHORT)
    for turn, (place, colour) in product(range(len(_MARKERS)), enumerate(_COLOURS)):
        marker = _MARKERS[(place + turn + 1) % len(_MARKERS)]
        if (colour, marker) not in looks:
            yield Style(colour, marker, dashes[(place + turn) % len(dashes)])

"""The same system looks the same everywhere, and no two in one picture look alike."""

import pytest

from lex_hf.evaluation.styles import is_lex, styles
from lex_hf.model.positions_lex import SCHEMES
from lex_hf.reproduce.recall_systems import systems
from lex_hf.rope.ways import WAYS


def style(name: str) -> dict[str, object]:
    return styles([name])[name]


def test_all_of_a_picture_are_different() -> None:
    for names in (
        list(SCHEMES),
        [way.title for way in WAYS.values()],
        ["xpos", "xPos", "XPOS", "xPos + BCA", "LEX"],
        [f"text {number}" for number in range(60)],
        [*SCHEMES, *(f"{scheme} + BCA" for scheme in SCHEMES), *(f"{scheme}, sliding" for scheme in SCHEMES), "own"],
    ):
        found = styles(names)
        assert list(found) == names
        assert len({tuple(look.values()) for look in found.values()}) == len(names)


def test_colours_and_markers_of_schemes_and_of_ways_are_different() -> None:
    for names in (SCHEMES, [way.title for way in WAYS.values() if not way.is_bounded]):
        assert len({(look["color"], look["marker"]) for look in styles(names).values()}) == len(names)


def test_systems_of_the_study_of_recall_differ_in_each_panel() -> None:
    panels: dict[str, list[str]] = {}
    for system in systems(64):
        panels.setdefault(system.group, []).append(system.name)
    for names in panels.values():
        assert styles(names) == {name: style(name) for name in names}  # none had to give way to another


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("xpos", "xPos"),
        ("xpos", "LEX without BCA"),
        ("xPos, full", "xPos"),
        ("LEX Transformer", "xPos + BCA"),
        ("lex", "xPos, blocks"),
        ("Roformer", "rope"),
        ("Rotary", "RoPE"),
        ("ζ = 0", "RoPE + BCA"),
        ("Alibi", "alibi"),
        ("Transformer", "sinusoidal"),
        ("Absolute + BCA", "sinusoidal, blocks"),
        ("no positions, full", "none"),
        ("xPos + Sliding Window", "xPos, sliding"),
        ("smoothed_sandwich", "Smoothed"),
        ("Llama, unchanged", "llama"),
        ("Llama, blockwise", "blockwise"),
    ],
)
def test_names_of_the_same(one: str, other: str) -> None:
    assert style(one) == style(other)


@pytest.mark.parametrize("name", [*SCHEMES, *(way.title for way in WAYS.values())])
def test_schemes_and_ways_have_a_style_of_their_own(name: str) -> None:
    assert styles(["unknown", "other", name])[name] == style(name)


def test_blocks_differ_by_their_dash() -> None:
    for scheme in SCHEMES:
        whole, blocks = style(scheme), style(f"{scheme} + BCA")
        assert whole | {"linestyle": None} == blocks | {"linestyle": None}
        assert whole["linestyle"] != blocks["linestyle"]


def test_unknown_names_look_like_no_known_system() -> None:
    known = {(style(scheme)["color"], style(scheme)["marker"]) for scheme in SCHEMES}
    found = styles(["books", "xpos", "talks"])
    assert not known & {(found[name]["color"], found[name]["marker"]) for name in ("books", "talks")}
    assert len({look["color"] for look in found.values()}) == 3
    assert found == styles(["books", "xpos", "talks"])
    assert found["xpos"] == style("xpos")


def test_more_systems_than_styles_are_drawn_all_the_same() -> None:
    assert len(styles(str(number) for number in range(300))) == 300


def test_lex_is_xpos_in_blocks() -> None:
    assert [name for name in ("LEX", "xpos", "xPos + BCA", "rope + BCA", "lex transformer") if is_lex(name)] == [
        "LEX",
        "xPos + BCA",
        "lex transformer",
    ]

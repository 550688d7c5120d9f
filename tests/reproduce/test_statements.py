"""Orders and trends compared with a paper, on numbers made up."""

from dataclasses import replace
from typing import Any

import pytest

from lex_hf.reproduce import published, tables
from lex_hf.reproduce.statements import Cell, difference, document_difference, marks, statements
from lex_hf.reproduce.tables import Claim, System, Table


def _cell(*values: float) -> Cell:
    return Cell(values, [[value, value * 1.5, value * 0.8] for value in values], [3, 1, 2])


def _made_up(cells: dict[str, dict[str, Cell]], *claims: Claim) -> list[Any]:
    systems = tuple(System(name, {}) for name in cells)
    table = Table("made-up", tables.LEX, "chunked", systems, (1024, 2048), "a", claims)
    values = {"corpus": {"a": {"1024": 10.0, "2048": 9.0}, "b": {"1024": 11.0, "2048": 12.0}, "c": {"1024": 10.0}}}
    printed = published.Published("made-up", "", "", "", "", "perplexity", 1024, "", values, {})
    return statements(table, printed, "corpus", cells)


def test_orders_agree_disagree_or_are_not_significant() -> None:
    cells = {
        "a": {"1024": _cell(1.00, 1.02, 1.01), "2048": _cell(0.90, 0.92, 0.91)},
        "b": {"1024": _cell(1.20, 1.21, 1.23), "2048": _cell(0.70, 0.73, 0.71)},
        "c": {"1024": _cell(1.22, 1.20, 1.22)},
    }
    found = {each.text: each for each in _made_up(cells, tables.falls("a", (1024, 2048)))}
    assert found["a falls at every step from {1024} to {2048}"].verdict == "agrees"
    at_l = found["order of the systems at {1024}"]
    pairs = {(part["left"][0], part["right"][0]): part["verdict"] for part in at_l.parts}
    # b is printed above c; a and c are printed alike, so nothing is said of them.
    assert pairs == {("a", "b"): "agrees", ("b", "c"): "not significant"}
    assert at_l.verdict == "not significant"
    assert found["order of the systems at {2048}"].verdict == "disagrees"
    assert found["rises and falls of a from length to length"].verdict == "agrees"
    assert found["rises and falls of b from length to length"].verdict == "disagrees"
    part = found["order of the systems at {2048}"].parts[0]
    assert part["difference"] == pytest.approx(0.91 - 0.7133, abs=1e-3)
    assert part["interval"][0] < part["difference"] < part["interval"][1]
    assert (part["pairing"], part["pairs"], part["documents"]) == ("seeds", 3, 3)
    assert part["p_value"] < part["document_p_value"] == pytest.approx(0.034, abs=1e-3)


def test_a_single_seed_is_paired_by_document_and_a_single_document_is_not_tested() -> None:
    a = Cell([1.0], [[1.0, 2.0, 3.0]])
    b = Cell([1.2], [[1.21, 2.2, 3.19]])
    found = difference(a, b)
    assert found == document_difference(a, b)
    assert (found.pairing, found.pairs, found.shows("<")) == ("documents", 3, "agrees")
    alone = difference(Cell([1.0], [[1.0]]), Cell([2.0], [[2.0]]))
    assert (alone.p_value, alone.shows("<"), alone.shows("≈", 9.0)) == (None, "not tested", "not tested")
    missing = _made_up({"a": {"1024": a}, "b": {}}, tables.differs("a", "<", "b", 1024))[0]
    assert (missing.verdict, missing.parts[0]["reason"]) == ("not tested", "there is no measurement")


def test_near_is_told_from_the_whole_interval() -> None:
    near, far, spread = _cell(1.00, 1.01, 1.02), _cell(2.0, 2.01, 2.03), _cell(0.5, 1.0, 1.6)
    assert difference(near, 1.0).shows("≈", 0.1) == "agrees"
    assert difference(far, near).shows("≈", 0.1) == "disagrees"
    assert difference(spread, near).shows("≈", 0.1) == "not significant"


def test_computed_values_need_no_test() -> None:
    low, high = Cell([1.0], [], (), True), Cell([2.0], [], (), True)
    assert [difference(low, high).shows("<"), difference(low, high).shows(">")] == ["agrees", "disagrees"]
    assert difference(low, low).shows("<") == "not significant"


def test_marks_say_where_the_reference_is_better_or_worse() -> None:
    table = Table("x", tables.SANDWICH, "last_token", (), (512,), "a")
    cells = {
        "a": {"512": _cell(1.0, 1.1, 1.2)},
        "better": {"512": _cell(0.8, 0.91, 1.0)},
        "worse": {"512": _cell(1.5, 1.6, 1.72)},
        "alike": {"512": _cell(1.2, 1.1, 1.0)},
    }
    assert marks(table, cells) == {("better", "512"): "*", ("worse", "512"): "†"}
    assert marks(replace(table, measure="resolution"), cells) == {("better", "512"): "†", ("worse", "512"): "*"}


def test_intervals_weigh_documents_by_their_tokens() -> None:
    cell = Cell([1.0, 3.0], [[1.0, 2.0], [1.0, 4.0]], [9, 1])
    assert cell.document_interval() == (1.0, 3.0)
    assert cell.seed_interval() == pytest.approx((2 - 12.706, 2 + 12.706), abs=1e-2)
    assert Cell([1.0], [[1.0]]).seed_interval() is None
    assert Cell([1.0], [[1.0]]).document_interval() is None

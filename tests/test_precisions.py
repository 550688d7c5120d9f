"""Decoding by the dtype of weights, in the benchmark: what is measured, the floor, and what the page says of it."""

from dataclasses import replace

import derived
import precision
import pytest
import systems
import torch
from helpers.benchmarks import FOLDER, TOY, made_up
from record import Rate, Record, Sample


def test_precisions_are_what_they_are_said_to_be() -> None:
    for kind, each in precision.PRECISIONS.items():
        model, numbers = precision._built(replace(TOY, dtype=each.states), "lex", kind)
        assert numbers == systems.linear_weights(systems.SYSTEMS["lex"].build(TOY))
        assert str(model.dtype) == f"torch.{each.states}"
        packed = [module for module in model.modules() if isinstance(module, precision.PackedLinear)]
        assert {module.bits for module in packed} == ({each.bits} if each.bits else set())
        assert len(packed) == (6 if each.bits else 0)
        cache = precision._filled(replace(TOY, dtype=each.states), model, 32, precision.ROWS, "lex_rows")
        lengths = cache.layers[0].lengths
        assert 28 < int(lengths.min()) < int(lengths.max()) == 32
        assert cache.layers[0].keys.shape == (precision.ROWS, 2, 2 * TOY.block, 16)
    with torch.no_grad():
        read = [what for what, *_ in precision._reading(TOY)]
    assert list(dict.fromkeys(read)) == list(precision.PRECISIONS)
    assert precision.of_name(precision.name_of("lex_rows", "int8")) == ("lex_rows", "int8")


def test_the_floor_of_a_precision_reads_weights_and_keys_at_their_own_speed() -> None:
    record = made_up()
    record.systems["lex_int8"] = {"description": "", "linear_weights": 1, "weight_bytes": 5 * 10**8}
    record.systems["lex_rows_int8"] = record.systems["lex_int8"]
    record.samples.append(Sample("precision", "lex_rows_int8", 1024, 16, [1.0] * 3))
    assert derived.precision_floor(record, "lex_int8") is None
    record.rates += [Rate("read int8", "slow", 10**9, [0.2]), Rate("read int8", "fast", 10**9, [0.1])]
    record.rates.append(Rate("read float32", "fast", 10**9, [0.05]))
    keys = 2 * 4 * 1024 * 4  # bytes of a key and a value in all layers
    # Three tokens after a context and a warm-up of two, which moved the blocks: 512 and 3, 4, 5 keys.
    expected = 0.05 + 516 * keys * 0.05 / 10**9
    assert derived.precision_floor(record, "lex_int8") == pytest.approx(expected)
    expected = 0.05 / 16 + 1024 * keys * 0.05 / 10**9
    assert derived.precision_floor(record, "lex_rows_int8") == pytest.approx(expected)


def test_the_page_has_the_ratios_of_the_record() -> None:
    if not (FOLDER / "precision.json").is_file():
        pytest.skip("precisions were not recorded yet")
    record = Record.read(FOLDER / "precision.json")
    page = (FOLDER.parent / "docs/generation.md").read_text(encoding="utf-8")
    names = {"bfloat16": 'dtype="bfloat16"', "int8": "PackedWeightsConfig(8)", "int4": "PackedWeightsConfig(4)"}
    for kind, name in names.items():
        cells = [cell.strip() for cell in page.split(f"\n| `{name}` |")[1].split("\n")[0].split("|")]
        for system, cell in zip(("lex", "blockwise_llama"), cells[1:3], strict=True):
            seconds, whole = (
                derived.per_token(record, "precision", f"{system}_{each}", 1024) for each in (kind, "float32")
            )
            assert seconds is not None
            assert whole is not None
            assert cell == f"{seconds / whole:.2f}"

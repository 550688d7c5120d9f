"""`lex-hf serve --dry-run`: figures without weights, without a server, and with nonsense."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands import lex
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, T5Config

from lex_hf import LexConfig
from lex_hf.cli.capacity import amount, parse_size
from lex_hf.inference import machine
from lex_hf.inference.capacity import capacity

LEX = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
MIXED = {"attention_pattern": ["blockwise", "full"]}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
HALF = {"dtype": "bfloat16"}
DEVICE = ("--device-memory", "80GiB", "--bandwidth", "3.35TB/s")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be in a folder with configurations, and no weights or tokenizers."""
    monkeypatch.chdir(tmp_path)
    LexConfig(**LEX).save_pretrained("lex")
    LexConfig(**LEX, **MIXED).save_pretrained("mixed")
    LexConfig(**LEX, attention_pattern="full").save_pretrained("full")
    LlamaConfig(**LLAMA, max_position_embeddings=256, **HALF).save_pretrained("llama")
    LlamaConfig(**LLAMA, quantization_config={"quant_method": "gptq", "bits": 4}).save_pretrained("gptq")
    T5Config().save_pretrained("t5")
    Path("broken").mkdir()
    Path("broken/config.json").write_text('{"model_type": "llama",')
    Path("odd").mkdir()
    Path("odd/config.json").write_text('{"model_type": "lex", "hidden_size": 7, "num_attention_heads": 2}')


def figures(*arguments: object) -> dict[str, Any]:
    done = lex("serve", *arguments, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("arguments", "config", "options"),
    [
        (["lex"], LexConfig(**LEX), {}),
        (["lex", "--dtype=float16"], LexConfig(**LEX), {"dtype": "float16"}),
        (["mixed", "--dtype", "bfloat16"], LexConfig(**LEX, **MIXED), {"dtype": "bfloat16"}),
        (["llama"], LlamaConfig(**LLAMA, **HALF), {}),
        (["llama", "--blockwise", "auto"], LlamaConfig(**LLAMA, **HALF), {"blockwise": 256}),
        (["llama", "--blockwise", 64, "--sinks", 4], LlamaConfig(**LLAMA, **HALF), {"blockwise": 64, "sinks": 4}),
    ],
)  # fmt: skip
def test_the_figures_are_those_of_capacity(arguments: list[str], config: Any, options: dict[str, Any]) -> None:
    found = figures(*arguments, *DEVICE)
    assert (found.pop("model"), found.pop("found_here")) == (arguments[0], {})
    expected = capacity(config, device_memory=80 * 2**30, bandwidth=3_350_000_000_000, **options)
    assert found == json.loads(json.dumps(expected.to_dict()))
    assert list(Path(arguments[0]).glob("*.safetensors")) == []


def test_the_page_shows_what_is_printed() -> None:
    """The page's example, whose models are described there."""
    LexConfig().save_pretrained("gpt-medium")
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    LlamaConfig(**sizes, **HALF, max_position_embeddings=8192).save_pretrained("llama-8b")
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text(encoding="utf-8")
    calls = [part.split("```")[0] for part in page.split("$ lex-hf serve ") if "--dry-run" in part.split("\n")[0]]
    assert len(calls) == 2
    for each in calls:
        call, *lines = each.strip().split("\n")
        shown = [line.strip() for line in lex("serve", *call.split()).stdout.split("\n")]
        begin = shown.index(lines[0].strip())
        assert shown[begin : begin + len(lines)] == [line.strip() for line in lines]
        assert len(lines) == 6


def test_the_table_shows_every_row_and_what_counts() -> None:
    found = figures("lex", *DEVICE)
    shown = " ".join(lex("serve", "lex", "--dry-run", *DEVICE).stdout.split())
    parameters = f"{found['parameters']:,} in float32 weights {amount(found['weights_bytes'])}"
    assert parameters in shown
    assert "memory of the device 80.0 GiB bandwidth 3,350 GB/s" in shown
    for name, each in (("blockwise any", found["blocks"][0]), ("full 1,048,576", found["full"][2])):
        row = f"{name} {amount(each['row_bytes'])} {each['rows']:,} {each['tokens_per_second']:,.0f}"
        assert f"{row} {each['tokens_per_second_alone']:,.0f}" in shown
    assert "embeddings that are not the head" in shown
    mixed = lex("serve", "mixed", "--dry-run", *DEVICE).stdout
    assert mixed.count("blockwise + full") == mixed.count("\nfull") == 3


NOTES = (
    "The weights alone do not fit",
    "none: beside the weights, not even one row",
    "All layers have full attention",
    "With --blockwise auto",
    "tried when it is loaded",
)


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        (["lex", *DEVICE], []),
        (["full", *DEVICE], [2]),
        (["llama", *DEVICE], [3]),
        (["llama", *DEVICE, "--blockwise", "64"], [4]),
        (["lex", "--device-memory", "20MB", "--bandwidth", "1GB/s"], [1]),
        (["llama", "--device-memory", "1MB", "--bandwidth", "1GB/s"], [0, 3]),
    ],
)
def test_what_is_to_be_known_is_said(arguments: list[str], notes: list[int]) -> None:
    done = lex("serve", "--dry-run", *arguments)
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    assert [number for number, note in enumerate(NOTES) if note in shown] == notes


def test_what_is_not_given_is_that_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_of", lambda device: 10**9)
    monkeypatch.setattr(machine, "measure_bandwidth", lambda device, memory: memory * 1.5)
    found = figures("lex", "--device", "cpu")
    assert (found["device_memory"], found["bandwidth"]) == (10**9, 1.5e9)
    assert found["found_here"] == {
        "device_memory": "available now (cpu)",
        "bandwidth": "measured, the fastest of a few sums of 512 MiB in float32 (cpu)",
    }
    assert list(figures("lex", "--device", "cpu", "--bandwidth", "2GB/s")["found_here"]) == ["device_memory"]
    given = figures("lex", "--device", "cpu", "--device-memory", "2GB")
    assert (given["device_memory"], given["bandwidth"]) == (2 * 10**9, 1.5e9)
    shown = " ".join(lex("serve", "lex", "--dry-run", "--device=cpu").stdout.split())
    assert "available now (cpu)" in shown
    assert "measured, the fastest" in shown


def test_a_real_machine_has_memory_and_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_READ", 2**22)
    found = figures("lex", "--device", "cpu")
    assert 2**20 < found["device_memory"] < 2**50
    assert 10**6 < found["bandwidth"] < 10**15
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lex", "--device-memory", "80GiB"], "belong to --dry-run: give it as well"),
        (["lex", "--json"], "belong to --dry-run: give it as well"),
        (["lex", "--dry-run", "--device-memory", "80"], "--device-memory 80: it must be a number and its unit"),
        (["lex", "--dry-run", "--device-memory", ""], "--device-memory : it must be a number and its unit"),
        (["lex", "--dry-run", "--device-memory", "80GB/s"], "--device-memory 80GB/s: it must be"),
        (["lex", "--dry-run", "--bandwidth", "80GB"], "--bandwidth 80GB: it must be a number and its unit"),
        (["lex", "--dry-run", "--bandwidth", "fast"], "--bandwidth fast: it must be"),
        (["lex", "--dry-run", "--bandwidth", "0GB/s"], "between 1 byte and 2^60"),
        (["lex", "--dry-run", "--device-memory", "9999999PB"], "between 1 byte and 2^60"),
        (["lex", "--dry-run", "--log-level", "info"], "--log-level has no effect with --dry-run"),
        (["lex", "--dry-run", "--max-new-tokens", 3], "--max-new-tokens has no effect with --dry-run"),
        (["lex", "--dry-run", "--dtype", "int4", *DEVICE], "dtype = 'int4': it must be one of float32, "),
        (["lex", "--dry-run", "--device", "cuda:99"], "device = 'cuda:99': torch finds"),
        (["lex", "--dry-run", "--blockwise", "8", *DEVICE], "A LEX model has blocks of its own"),
        (["lex", "--dry-run", "--blockwise", "x", *DEVICE], "--blockwise x: it must be 'auto' or a number"),
        (["lex", "--dry-run", "--sinks", "4", *DEVICE], "--sinks 4: only a model that reads in blocks"),
        (["llama", "--dry-run", "--blockwise", "9", *DEVICE], "training_length = 9: it must be an even number"),
        (["gptq", "--dry-run", *DEVICE], "The weights are quantised"),
        (["t5", "--dry-run", *DEVICE], "has no causal language model for it"),
        (
            ["missing", "--dry-run", *DEVICE],
            "the configuration of a model (config.json) from 'missing'",
        ),
        (["broken", "--dry-run", *DEVICE], "the configuration of a model (config.json) from 'broken'"),
        (["odd", "--dry-run", *DEVICE], "must be a multiple of num_attention_heads"),
        (["--dry-run", *DEVICE, "--", "--model"], "--model is an option, not a MODEL"),
    ],
)
def test_nonsense_is_a_sentence(arguments: list[str], message: str) -> None:
    done = lex("serve", *arguments)
    assert (done.exit_code, done.stdout) == (1, "")
    assert message in " ".join(done.stderr.split())
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        (" 1.5TiB ", 3 * 2**39),
        ("24kB", 24_000),
        ("24KiB", 24 * 1024),
        ("7B", 7),
        ("0.1GB", 10**8),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse_size(text, "--device-memory") == size
    assert parse_size(f"{text.strip()}/s", "--bandwidth", per_second=True) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "GiB",
        "-1GB",
        "1e3GB",
        "1,5GB",
        "1.GB",
        "80Gb",
        "80gb",
        "80iB",
        "80XB",
        "٣GB",
        "inf GB",
        "1GB GB",
        "0B",
    ],
)
def test_other_sizes_are_an_error(text: str) -> None:
    for each, per_second in ((text, False), (f"{text}/s", True)):
        with pytest.raises(ValueError, match="--size"):
            parse_size(each, "--size", per_second)


@given(st.integers(1, 10**6), st.integers(0, 999), st.sampled_from(["k", "M", "G"]), st.booleans())
def test_sizes_are_exact(whole: int, thousandths: int, prefix: str, is_binary: bool) -> None:
    unit = (1024 if is_binary else 1000) ** ("kMG".index(prefix) + 1)
    expected = int((whole + Fraction(thousandths, 1000)) * unit)
    assert parse_size(f"{whole}.{thousandths:03}{prefix}{'i' * is_binary}B", "--size") == expected


@given(st.integers(0, 2**62))
def test_amounts_are_read_back(size: int) -> None:
    shown = amount(size)
    value, unit = shown.split()
    power = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)
    assert float(value) * 1024**power == pytest.approx(size, rel=0.006)
    assert len(shown) <= 8

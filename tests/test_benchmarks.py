"""The benchmark at toy size: every system is there, what is compared is comparable, and tables show the record."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import derived
import interleave
import measurements
import memory
import precision
import pytest
import report
import run
import systems
import torch
from helpers.benchmarks import FOLDER, TOY, made_up
from record import Record, Sample, find
from rich.console import Console
from settings import PARTS, PRESETS, Settings
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from lex_hf.model.masking_lex import BlockwisePattern


@pytest.fixture(scope="module")
def record() -> Record:
    """A whole run, with memory measured in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "in_a_process", memory.peaks)
        record = Record.begin("cpu", "python benchmarks/run.py", TOY)
        measurements.measure(record, PARTS, compiled=False, console=Console(quiet=True))
    record.finish()
    return record


def test_every_system_is_measured(record: Record) -> None:
    calls = {(each.measure, each.system, each.length): len(each.seconds) for each in record.samples}
    everyone = ["lex", "gpt_neox", "llama", "blockwise_llama", "mistral", "dense_mask", "linear", "linear_llama"]
    assert list(systems.SYSTEMS) == everyone
    expected = {("prefill", name, length): 2 for name in everyone for length in (32, 64)}
    expected |= {("decode", name, context): 4 for name in everyone for context in (32, 64)}
    expected |= {("decode", name, context): 8 for name in systems.IN_BLOCKS for context in (32, 64)}
    expected |= {("chunked", name, length): 2 for name in systems.IN_BLOCKS for length in (32, 64)}
    expected |= {("chunked", name, length): 1 for name in systems.FLOORS for length in (32, 64)}
    for kind in precision.PRECISIONS:
        of_kind = dict.fromkeys(("llama",), 4) | dict.fromkeys(systems.IN_BLOCKS, 8) | {"lex_rows": 4}
        expected |= {("precision", f"{name}_{kind}", 32): number for name, number in of_kind.items()}
    expected |= {("training", name, 16): 2 for name in ("lex", "none")}
    expected |= {("training", name, 16): 1 for name in ("lex_checkpointed", "gpt_neox", "llama", "mistral")}
    assert calls == expected
    assert all(seconds > 0 for each in record.samples for seconds in each.seconds)
    rates = [each for each in record.rates if not each.what.startswith("read ")]
    assert [(each.what, each.amount) for each in rates] == [
        ("read", 2**16),
        ("read", 2**16),
        ("multiply", 2 * 16**3),
    ]


def test_the_memory_of_caches(record: Record) -> None:
    held = {(each.system, each.length): each.cache for each in record.samples if each.measure == "decode"}
    token, decoded = 2 * 32 * 4, TOY.warm_up + TOY.decode_tokens
    for context in (32, 64):
        assert [held[name, context] for name in systems.IN_BLOCKS] == [2 * TOY.block * token] * 2
        assert held["llama", context] == (context + decoded) * token
        assert [held[name, context] for name in systems.FLOORS] == [None] * 2


def test_memory_of_every_task(record: Record) -> None:
    tasks = [(each.task, each.system, each.length) for each in record.peaks]
    expected = [
        ("prefill", name, length) for name in systems.SYSTEMS if name not in systems.FLOORS for length in (32, 64)
    ]
    expected += [("training", "lex", 16), ("checkpointed", "lex", 16)]
    assert tasks == [*expected, ("streaming", "lex", 64), ("streaming", "lex", 128)]
    assert all(each.peak >= each.built > 0 and each.seconds > 0 for each in record.peaks)


def test_all_do_the_same_arithmetic(record: Record) -> None:
    matrices = 4 * 32 * 32 + 2 * 32 * 96
    assert {each["linear_weights"] for each in record.systems.values()} == {matrices}
    kinds = [f"{name}_{kind}" for kind in precision.PRECISIONS for name in precision.SYSTEMS_MEASURED]
    assert set(record.systems) == {*systems.SYSTEMS, *kinds}
    counted = {}
    for name in systems.OWN:
        model = systems.SYSTEMS[name].build(TOY)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(inputs_embeds=torch.randn(1, 64, 32))
        counted[name] = counter.get_flop_counts()["Global"]
    with_bias, without = torch.ops.aten.addmm, torch.ops.aten.mm
    assert counted["linear"] == {with_bias: 2 * 64 * matrices}
    assert counted["lex"][with_bias] == 2 * 64 * matrices
    assert counted["linear_llama"] == {without: 2 * 64 * matrices}
    assert counted["blockwise_llama"][without] == 2 * 64 * matrices
    # Two thirds of 4096, of three matrices in place of two.
    assert abs(3 * Settings().gated_intermediate_size - 2 * 4096) < 0.002 * 2 * 4096


def test_weights_that_every_token_needs() -> None:
    model: Any = systems.SYSTEMS["lex"].build(TOY)
    biases_and_norms = 4 * 32 + 96 + 32 + 6 * 32
    assert systems.weight_bytes(model) == 4 * (systems.linear_weights(model) + biases_and_norms)


def test_the_dense_mask_is_blockwise_causal() -> None:
    model: Any = systems.SYSTEMS["dense_mask"].build(TOY)
    states, everything = torch.randn(1, 64, 32), torch.arange(64)
    with torch.no_grad():
        mask = model.mask(states, systems.new_cache(model))
        assert torch.equal(mask[0, 0], BlockwisePattern(TOY.block).visible(everything, everything))
        cache = systems.new_cache(model)
        for begin, end in ((0, 21), (21, 22), (22, 50), *((place, place + 1) for place in range(50, 64))):
            size, first = cache.get_mask_sizes(end - begin, 0)
            mask = model.mask(states[:, begin:end], cache)
            keys = torch.arange(first, first + size)
            assert torch.equal(mask[0, 0], BlockwisePattern(TOY.block).visible(everything[begin:end], keys))
            model(inputs_embeds=states[:, begin:end], past_key_values=cache)
        # The mask acts: what one layer makes of the third block does not depend on the first.
        before, after = (
            model(inputs_embeds=each).last_hidden_state
            for each in (states, torch.cat((-states[:, :8], states[:, 8:]), 1))
        )
    assert torch.equal(before[:, 16:], after[:, 16:])
    assert not torch.isclose(before[:, 8:16], after[:, 8:16]).all(dim=-1).any()


@pytest.mark.parametrize("name", ["gpt_neox", "llama", "mistral"])
def test_peers_see_what_they_are_said_to_see(name: str) -> None:
    model = systems.SYSTEMS[name].build(TOY)
    assert model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    states = torch.randn(1, 40, 32, requires_grad=True)
    model(inputs_embeds=states, use_cache=False).last_hidden_state[0, -1, 0].backward()
    assert states.grad is not None
    assert int((states.grad[0] != 0).any(dim=-1).sum()) == systems.SYSTEMS[name].keys(TOY, 39)


def test_the_blockwise_llama_computes_what_the_dense_mask_does() -> None:
    model: Any = systems.SYSTEMS["blockwise_llama"].build(TOY)
    dense: Any = systems.SYSTEMS["dense_mask"].build(TOY)
    dense.model.load_state_dict(model.state_dict())
    states = torch.randn(1, 50, 32)
    with torch.no_grad():
        blocks, masked = (each(inputs_embeds=states).last_hidden_state for each in (model, dense))
    torch.testing.assert_close(blocks, masked)


@pytest.mark.parametrize("name", systems.IN_BLOCKS)
def test_what_reads_in_blocks_is_said_to_meet_the_keys_in_its_cache(name: str) -> None:
    model: Any = systems.SYSTEMS[name].build(TOY)
    cache: Any = systems.new_cache(model)
    with torch.no_grad():
        for read in range(40):
            model(inputs_embeds=torch.randn(1, 1, 32), past_key_values=cache)
            assert cache.layers[0].fill == systems.SYSTEMS[name].keys(TOY, read)


@pytest.mark.parametrize("name", systems.IN_BLOCKS)
def test_the_cost_of_a_move_is_that_of_the_token_before_which_blocks_move(name: str) -> None:
    model: Any = systems.SYSTEMS[name].build(TOY)
    cache: Any = systems.new_cache(model)
    seconds = []
    with torch.no_grad():
        model(inputs_embeds=torch.randn(1, 32 + TOY.warm_up, 32), past_key_values=cache)
        for _ in range(TOY.block):
            before = cache.layers[0].fill
            model(inputs_embeds=torch.randn(1, 1, 32), past_key_values=cache)
            seconds.append(9.0 if cache.layers[0].fill < before else 1.0)
    sample = Sample("decode", name, 32, 1, seconds)
    record = Record("cpu", "", "", {}, {}, TOY, samples=[sample])
    assert derived.decode_cost(record, sample) == derived.DecodeCost(1.0, 9.0, 2.0)
    assert derived.per_token(record, "decode", name, 32) == 2.0
    early = Sample("decode", name, 1, 1, [3.0, 3.0])
    assert derived.decode_cost(record, early) == derived.DecodeCost(3.0, None, 3.0)


def test_jobs_take_turns() -> None:
    called: list[str] = []
    jobs = {
        "each": interleave.Job(lambda: called.append("each"), calls=2),
        "some": interleave.Job(lambda: called.append("some"), turns=2),
        "last": interleave.Job(lambda: called.append("last")),
    }
    interleave.interleave(list(jobs.values()), 4, "cpu")
    forwards_with_some, backwards = ["each", "each", "some", "last"], ["last", "each", "each"]
    assert called == [*forwards_with_some, *backwards, *forwards_with_some, *backwards]
    assert {name: len(job.seconds) for name, job in jobs.items()} == {"each": 8, "some": 2, "last": 4}
    interleave.interleave([jobs["last"]], 4, "cpu", budget=0.0)
    assert len(jobs["last"].seconds) == 5


def test_times_continue_as_they_grow() -> None:
    times = {length: 3.0 * length + 2.0 * length**2 for length in (10, 40, 90, 200)}
    known = {length: times[length] for length in (10, 40, 90)}
    assert systems.extrapolated(known, 200) == pytest.approx(times[200])
    assert systems.extrapolated({10: 5.0}, 20) == pytest.approx(10.0)
    assert systems.extrapolated({10: 5.0, 20: 8.0}, 40) == pytest.approx(16.0)  # never faster than in proportion


def test_peers_are_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    llama, mistral = systems.SYSTEMS["llama"], systems.SYSTEMS["mistral"]
    assert systems.why_not(TOY, llama, 64, {}) is None
    assert systems.why_not(TOY, llama, 64, {32: 9.0}) is None
    assert systems.why_not(TOY, llama, 64, {32: 11.0}) == "one call would take about 22 s"
    assert systems.why_not(TOY, mistral, 64, {32: 11.0}) is None
    assert systems.why_not(TOY, mistral, 64, {32: 61.0}) == "one call would take about 122 s"
    monkeypatch.setattr(systems, "free_memory", lambda settings: 2**31)
    assert systems.why_not(TOY, llama, 2**16, {}) is None
    assert systems.why_not(TOY, mistral, 2**16, {}) == "its mask would take 20 GiB"
    impatient = replace(TOY, call_limit=0.0)
    left_out = memory.peaks(impatient, "prefill", "llama", (32, 64))
    assert left_out[0].skipped is None
    assert left_out[1].skipped is not None
    assert left_out[1].skipped.startswith("one call would take about")
    models = {name: systems.SYSTEMS[name].build(TOY) for name in ("lex", "llama", "linear")}
    samples = measurements.prefill(impatient, models, Console(quiet=True))
    assert {(each.system, each.length) for each in samples if each.skipped} == {("llama", 64)}
    assert {(each.system, each.length) for each in samples if each.seconds} == {
        *((name, 32) for name in models),
        ("lex", 64),
        ("linear", 64),
    }


def test_a_cache_without_room_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "free_memory", lambda settings: 2**31)
    assert measurements._no_room(replace(TOY, hidden_size=1024), "llama", 2**17) == "its cache takes 1 GiB"
    assert measurements._no_room(replace(TOY, hidden_size=1024), "lex", 2**17) is None


@pytest.mark.processes
def test_memory_is_that_of_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = torch.ones(300_000_000)  # 1.2 GB, which the other process must not inherit
    short, long = memory.in_a_process(TOY, "prefill", "lex", (64, 2**16))
    assert (short.task, short.system, short.length, long.length) == ("prefill", "lex", 64, 2**16)
    assert 0 < short.built <= short.peak < ours.nbytes
    assert long.peak - short.peak >= 2**16 * 96 * 4  # the feed-forward layer's intermediate states
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))  # without a standard library it fails at once
    with pytest.raises(RuntimeError, match=r"memory of prefill with lex failed:\n(?s:.*)Fatal Python error"):
        memory.in_a_process(TOY, "prefill", "lex", (64,))


def test_compiled_decoding_reads_the_same_text() -> None:
    models: dict[str, Any] = {name: systems.SYSTEMS[name].build(TOY) for name in measurements.COMPILED}
    token = torch.randn(1, 1, 32)
    with torch.no_grad():
        for name, model in models.items():
            torch.manual_seed(1)
            cache = measurements._static_cache(TOY, model, 33)
            assert int(cache.get_seq_length()) == 33
            torch.manual_seed(1)
            plain = systems.new_cache(model)
            if name == "lex":
                for size in (16, 16, 1):
                    model(inputs_embeds=memory.random_states(TOY, 1, size), past_key_values=plain)
            else:
                measurements._filled(TOY, model, plain, 33)
            outputs = [model(inputs_embeds=token, past_key_values=each).last_hidden_state for each in (cache, plain)]
            torch.testing.assert_close(*outputs)


def test_a_record_comes_back_as_it_was(record: Record, tmp_path: Path) -> None:
    record.write(tmp_path / "record.json")
    assert Record.read(tmp_path / "record.json") == record
    content = json.loads((tmp_path / "record.json").read_text())
    assert list(content) == [
        *("preset", "command", "date", "machine", "software", "settings", "systems", "rates", "samples", "peaks")
    ]
    assert set(content["machine"]) == {"cpu", "cores", "threads", "memory", "accelerator", "load_before", "load_after"}
    assert set(content["software"]) == {"python", "torch", "transformers", "lex_hf"}
    assert content["machine"]["load_after"] is not None
    assert content["settings"]["hidden_size"] == 32
    assert set(content["samples"][0]) == {"measure", "system", "length", "tokens", "seconds", "skipped", "cache"}
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"other\.json is no record of this benchmark"):
        Record.read(tmp_path / "other.json")


def test_a_record_from_before_a_system_is_shown_without_it(record: Record, tmp_path: Path) -> None:
    newer, content = ("blockwise_llama", "linear_llama"), json.loads(record.to_json())
    newer = (*newer, *(name for name in content["systems"] if name not in systems.SYSTEMS))
    content["systems"] = {name: each for name, each in content["systems"].items() if name not in newer}
    for items in ("samples", "peaks"):
        content[items] = [each for each in content[items] if each["system"] not in newer]
    for sample in content["samples"]:
        del sample["cache"]
    (tmp_path / "older.json").write_text(json.dumps(content))
    text = report.section(Record.read(tmp_path / "older.json"))
    for name in systems.SYSTEMS:
        assert (f"\n| {name} | " in text) == (f"- `{name}`: " in text) == (name not in newer)
    assert "KiB" not in text


def test_tables_show_the_record(record: Record) -> None:
    tables = {table.title: table for table in report.tables(record)}
    assert len(tables) == 15
    for table in tables.values():
        assert {len(row) for row in table.rows} == {len(table.columns)}
    sample = find(record.samples, "prefill", "llama", 64)
    assert sample is not None
    (times,) = [table for title, table in tables.items() if title.startswith("Prefill in one pass: µs")]
    middle, half = sum(sample.seconds) / 2 / 64e-6, abs(sample.seconds[0] - sample.seconds[1]) / 4 / 64e-6
    assert middle >= 0.01
    decimals = 0 if middle >= 100 else 1 if middle >= 10 else 2 if middle >= 1 else 3 if middle >= 0.1 else 4
    assert {row[0]: row[2] for row in times.rows}["llama"] == f"{middle:.{decimals}f} ± {half:.{decimals}f}"
    assert [row[0] for row in times.rows] == list(systems.SYSTEMS)
    ratios = list(tables.values())[1]
    floors = {name: derived.per_token(record, "prefill", name, 64) for name in ("lex", "llama", "linear")}
    expected = f"{floors['llama'] / floors['linear']:.3f} ({floors['llama'] / floors['lex']:.3f})"
    assert {row[0]: row[2] for row in ratios.rows}["llama"] == expected


def test_targets_are_computed_as_they_are_worded() -> None:
    record = made_up()
    values = [each.value for each in derived.targets(record)]
    floor = 0.010 / 0.009
    streamed = (10**9 + 65536) / (10**9 + 8192)
    expected = [1.3, 3.0, 1.0, 66 / 64, 1.0, 10 / 11, 5.1, 1.0, floor, floor, streamed, 1.01]
    expected += [12.5 / 9, 39 / 12.5, 1.0, 1.0, 0.79, 0.64, 0.49]
    assert values == [pytest.approx(each, rel=1e-3) for each in expected]
    assert [each.verdict for each in derived.targets(record)] == ["holds"] * 19


@pytest.mark.parametrize(
    ("name", "seconds", "broken"),
    [
        ("prefill lex 16384", 14.1, {0}),
        ("prefill mistral 16384", 32.0, {1}),
        ("prefill lex 65536", 71.0, {2}),
        ("chunked lex 65536", 71.0, {3}),
        ("decode lex 8192", 0.0107, {4, 6, 7}),
        ("decode mistral 1024", 0.0099, {5}),
        ("decode llama 8192", 0.049, {6}),
        ("decode lex 1024", 0.012, {5, 8}),
        ("training lex 1024", 1.03, {11}),
        ("prefill linear_llama 16384", 8.9, {12}),
        ("prefill blockwise_llama 16384", 15.7, {12, 13}),
        ("decode blockwise_llama 8192", 0.0211, {14}),
        ("precision lex_bfloat16 1024", 0.81, {16}),
        ("precision lex_int4 1024", 0.51, {18}),
    ],
)
def test_a_target_that_is_missed_does_not_hold(name: str, seconds: float, broken: set[int]) -> None:
    verdicts = [each.verdict for each in derived.targets(made_up(**{name: seconds}))]
    assert {place for place, each in enumerate(verdicts) if each == "does not hold"} == broken
    assert set(verdicts) == {"holds", "does not hold"}


def test_a_cache_that_grows_misses_its_target() -> None:
    record = made_up()
    record.samples = [replace(each, cache=each.length) if each.cache else each for each in record.samples]
    assert [derived.targets(record)[place].verdict for place in (14, 15)] == ["holds", "does not hold"]


def test_what_was_not_measured_is_neither() -> None:
    record = made_up()
    record.samples = [each for each in record.samples if each.system not in ("gpt_neox", "linear_llama")]
    record.peaks = record.peaks[:1]
    verdicts = [each.verdict for each in derived.targets(record)]
    assert {place for place, each in enumerate(verdicts) if each == "not measured"} == {5, 6, 10, 12}


def test_a_record_is_shown_in_readme(record: Record, tmp_path: Path) -> None:
    begin, end = report.markers("cpu")
    (tmp_path / "README.md").write_text(f"before\n\n{begin}old\n{end}\n\nafter\n", encoding="utf-8")
    for _ in range(2):
        report.render(record, tmp_path)
        text = (tmp_path / "README.md").read_text(encoding="utf-8")
        assert text == f"before\n\n{begin}{report.section(record)}{end}\n\nafter\n"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "cpu.json", "cpu.png"]
    assert Record.read(tmp_path / "cpu.json") == record
    for name in systems.SYSTEMS:
        assert f"\n| {name} | " in text
    (tmp_path / "README.md").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"no place for cpu\.json"):
        report.render(record, tmp_path)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_readme_shows_the_record(preset: str) -> None:
    begin, end = report.markers(preset)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert (readme.count(begin), readme.count(end)) == (1, 1)
    if not (FOLDER / f"{preset}.json").is_file():
        pytest.skip(f"{preset} was not recorded yet")
    record = Record.read(FOLDER / f"{preset}.json")
    assert readme.split(begin)[1].split(end)[0] == report.section(record)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "in_a_process", memory.peaks)
    monkeypatch.setitem(PRESETS, "cpu", {name: getattr(TOY, name) for name in TOY.__dataclass_fields__})
    monkeypatch.setattr(sys, "argv", ["/my/run.py", "--only", "prefill", "--output", "/my/out", "--compile"])
    runner, folder = CliRunner(), tmp_path / "out"
    result = runner.invoke(
        run.app, ["--only", "prefill,streaming", "--layers", "2", "--lengths", "16,48", "--output", str(folder)]
    )
    assert result.exit_code == 0, result.output
    assert "Prefill in one pass" in result.output
    assert sorted(path.name for path in folder.iterdir()) == ["cpu.png", "record.json", "tables.md"]
    record = Record.read(folder / "record.json")
    assert record.command == "python benchmarks/run.py --only prefill --compile"
    assert (record.settings.layers, record.settings.lengths) == (2, (16, 48))
    assert {each.measure for each in record.samples} == {"prefill", "chunked"}
    assert {each.task for each in record.peaks} == {"prefill", "streaming"}
    assert (folder / "tables.md").read_text(encoding="utf-8") == report.section(record)
    checked = runner.invoke(run.app, ["--check", str(folder / "record.json")])
    assert checked.exit_code == 1
    assert "not measured" in checked.output
    made_up().write(folder / "good.json")
    assert runner.invoke(run.app, ["--check", str(folder / "good.json")]).exit_code == 0
    rendered: list[Record] = []
    monkeypatch.setattr(run, "render", rendered.append)
    assert runner.invoke(run.app, ["--render", str(folder / "record.json")]).exit_code == 0
    assert rendered == [record]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "prefill,speed"], "'speed' is none of prefill, decode, training, streaming, precision"),
        (["--lengths", "1k"], "give whole numbers, separated by commas"),
        (["--lengths", "64,32"], "lengths: 64, 32. Give positive numbers of tokens, each larger than the one before."),
        (["--preset", "gpu", "--only", "precision"], "precision is measured on a CPU; leave it out"),
        (["--layers", "0"], "layers = 0: it must be at least 1."),
        (["--preset", "tpu"], "--preset tpu: it must be one of cpu, precision, gpu."),
        (["--check", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(run.app, arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.output.split())

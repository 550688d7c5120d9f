"""README and the pages of docs keep their word: their code runs, and their tables are those on record."""

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import drawings
import pytest
import torch
from helpers.forks import LIBRARIES
from helpers.models import random_ids, tiny_model
from helpers.rope_models import rope_model

from lex_hf.reproduce import report, summary
from lex_hf.reproduce.extrapolation import Extrapolation
from lex_hf.reproduce.tables import TABLES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
_LOAD = """
import lex_hf
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("model_cards/lex-books-3m")
model = AutoModelForCausalLM.from_pretrained("model_cards/lex-books-3m")
llama = AutoModelForCausalLM.from_pretrained("my_llama")
"""
# What a page's code goes on from, as its text says.
BEFORE = {
    "recall.md": f"""{_LOAD}
from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM
sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
sizes |= dict(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None, max_position_embeddings=64)
smollm3 = SmolLM3ForCausalLM(SmolLM3Config(num_hidden_layers=8, **sizes))
llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
""",
    "serving.md": _LOAD,
}
# Their code needs what no test has: ray, or half an hour and books.
NOT_RUN = {"replicas.md", "sinks.md"}


def demo_table() -> str:
    """The demo's table in Markdown, from the results that a run of the demo left."""
    curves = json.loads((ROOT / "notebooks/demo/results.json").read_text())["perplexity"]
    rows = [["length", *curves], ["---:"] * (1 + len(curves))]
    rows += [[length, *(f"{curve[length]:.3f}" for curve in curves.values())] for length in curves["xPos"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def comparison() -> Extrapolation:
    """The comparison of schemes, from the results that its command left."""
    record = json.loads((ROOT / "notebooks/demo/extrapolation.json").read_text())
    curves = {
        system: {int(length): values for length, values in curve.items()}
        for system, curve in record["perplexity"].items()
    }
    return Extrapolation(record["steps"], record["seeds"], curves)


def zoo_table() -> str:
    """Perplexity of the checkpoint, from the record of its card."""
    record = json.loads((ROOT / "model_cards/lex-books-3m/record.json").read_text())
    lengths = list(record["evaluation"]["books"])
    rows = [["texts", *lengths], ["---", *["---:"] * len(lengths)]]
    for name, curve in record["evaluation"].items():
        rows.append([name, *(f"{curve[length]['perplexity']:.2f}" for length in lengths)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def reproduced_table(folder: str = "books/lex-table2-tiny") -> str:
    """The first table of a report on the LEX paper's Table 2."""
    report = (ROOT / f"notebooks/reproduction/{folder}/report.md").read_text(encoding="utf-8")
    return next(block for block in report.split("\n\n") if block.startswith("| system"))


def starts_table(tables: Mapping[str, str]) -> str:
    """What reports of the LEX paper's Table 2 have at l and at 8 l, by the standard deviation of new matrices."""
    made = [reproduced_table(folder).splitlines() for folder in tables.values()]
    rows = [["system", *(f"{start} at {length}" for length in ("*l*", "8 *l*") for start in tables)]]
    rows.append(["---", *["---:"] * (2 * len(tables))])
    for lines in zip(*made, strict=True):
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines]
        name = cells[0][0]
        if name not in ("system", "---", "*as printed*"):
            rows.append([name, *(row[column].rstrip("†*\\") for column in (3, 6) for row in cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def overview() -> str:
    """All tables and figures that were made again, with links from docs."""
    page = (ROOT / "notebooks/reproduction/books/summary.md").read_text(encoding="utf-8")
    table = next(block for block in page.split("\n\n") if block.startswith("| made again"))
    return table.replace("](", "](../notebooks/reproduction/books/")


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("page", "record", "table"),
    [
        ("README.md", "model_cards/lex-books-3m/record.json", zoo_table),
        ("docs/papers.md", "notebooks/reproduction/books/summary.md", overview),
        ("docs/papers.md", "notebooks/reproduction/books/lex-table2-tiny/record.json", reproduced_table),
        (
            "docs/papers.md",
            "notebooks/reproduction/initializer-0.02",
            lambda: starts_table({"0.02": "initializer-0.02/lex-table2-tiny", "0.1": "books/lex-table2-tiny"}),
        ),
        (
            "docs/papers.md",
            "notebooks/reproduction/books-small/lex-table2-small/record.json",
            lambda: reproduced_table("books-small/lex-table2-small"),
        ),
        (
            "docs/papers.md",
            "notebooks/reproduction/initializer-0.0625",
            lambda: starts_table(
                {"0.02": "books-small/lex-table2-small", "0.0625": "initializer-0.0625/lex-table2-small"}
            ),
        ),
        ("docs/papers.md", "notebooks/demo/results.json", demo_table),
        ("docs/papers.md", "notebooks/demo/extrapolation.json", lambda: comparison().markdown()),
    ],
)
def test_the_tables_are_those_on_record(page: str, record: str, table: Callable[[], str]) -> None:
    begin, end = f"<!-- table: {record} -->\n", "<!-- end of table -->"
    assert (ROOT / page).read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip() == table().strip()


@pytest.mark.parametrize("folder", sorted(ROOT.glob("notebooks/reproduction/*/*/")), ids=lambda path: path.name)
def test_reports_are_those_of_their_records(folder: Path) -> None:
    assert (folder / "report.md").read_text(encoding="utf-8") == report.render(record_of(folder))
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", (folder / "report.md").read_text(encoding="utf-8")):
        assert (folder / picture).is_file()


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("notebooks/reproduction/*/summary.md")), ids=lambda path: path.parent.name
)
def test_summaries_are_those_of_the_records(page: Path) -> None:
    names = [f"{name}-tiny" for name in TABLES]
    records = {name: record_of(page.parent / name) for name in names if (page.parent / name).is_dir()}
    assert page.read_text(encoding="utf-8") == summary.render(records)
    if page.parent.name == "books":
        assert list(records) == names


@pytest.mark.parametrize(
    "verdict",
    [
        "agrees**: LEX Transformer falls at every step from 32 to 1024",
        "agrees**: LEX Transformer < Alibi at 1024",
        "agrees**: xPos + BCA < RoPE + BCA at 1024",
        *(f"agrees**: {name} is higher at every length beyond 128" for name in ("Transformer", "Roformer")),
        "agrees**: RoPE + BCA < RoPE at 1024",
        *(f"agrees**: LEX < {ablation} at 1024" for ablation in ("w/o Rotation", "ζ = 0")),
        *(f"agrees**: LEX > {name} at 256" for name in ("Transformer", "Alibi", "Roformer", "LEX without BCA")),
        *(f"agrees**: Δ = {shift} is higher at every length beyond 128" for shift in (4, 6, 8)),
        *(f"agrees**: w = {window} stays within a factor of 1.1 from 128 to 2048" for window in (40, 80, 100)),
        *(f"agrees**: Δ = -3 has a smaller ERF than Δ = {shift}" for shift in (0, 2, 4, 6, 8)),
        *(f"agrees**: ERF of {name} is more than l" for name in ("Rotary", "Sandwich", "T5")),
        "agrees**: Sinusoidal: the gradient jumps at the token where training ended",
        *(f"agrees**: Sandwich < {name} at 2048" for name in ("ALiBi", "Rotary", "T5", "Sinusoidal")),
        "disagrees**: Alibi is higher at every length beyond 128",
        "disagrees**: LEX < Scalar ζ at 128",
        "disagrees**: xPos + Sliding Window < xPos + BCA at 1024",
        "disagrees**: Sandwich gives about 60 % to the newest l tokens",
        "disagrees**: Sandwich, full attention < Sandwich at 1024",
        *(f"disagrees**: ERF of w = {window} is more than l" for window in (120, 160)),
        "not significant**: LEX < Scalar ζ at 1024",
        "not significant**: LEX > Roformer at 128",
        "not significant**: KERPLE < Sandwich at 2048",
        "not significant**: Sandwich falls at every step from 128 to 256",
        "not significant**: Alibi + BCA < Alibi at 1024",
        "not significant**: Absolute < Absolute + BCA at 1024",
        *(f"not significant**: ERF of {name} is more than l" for name in ("KERPLE", "Δ = -3")),
        *(f"not significant**: {name} is higher at every length beyond 128" for name in ("Δ = 0", "w = 160", "h = 4")),
        "not significant**: w = 160, longer training < w = 160 at 2048",
        "not significant**: Sinusoidal, short training: the gradient jumps at the token where training ended",
    ],
)
def test_the_papers_hold_as_the_page_says(verdict: str) -> None:
    page = (ROOT / "notebooks/reproduction/books/summary.md").read_text(encoding="utf-8")
    assert f"- **{verdict}" in page.splitlines()


@pytest.mark.parametrize(
    ("folder", "verdict"),
    [
        ("books-small/lex-table2-small", "agrees**: LEX Transformer falls at every step from 64 to 2048"),
        ("books-small/lex-table2-small", "agrees**: LEX Transformer < Alibi at 2048"),
        ("books-small/lex-table2-small", "agrees**: Roformer is higher at every length beyond 256"),
        ("books-small/lex-table2-small", "not significant**: Transformer is higher at every length beyond 256"),
        ("books-small/lex-table2-small", "disagrees**: rises and falls of Alibi from length to length"),
        ("books-small/lex-table2-small", "not significant**: LEX Transformer ≤ Roformer + BCA at 2048"),
        ("books-small/lex-table5-small", "agrees**: xPos + BCA < xPos at 2048"),
        ("books-small/lex-table5-small", "agrees**: RoPE + BCA < RoPE at 2048"),
        ("books-small/lex-table5-small", "not significant**: xPos + Sliding Window < xPos + BCA at 2048"),
        ("initializer-0.0625/lex-table2-small", "agrees**: LEX Transformer ≤ Roformer + BCA at 2048"),
        *(
            ("initializer-0.0625/lex-table2-small", f"agrees**: order of the systems at {length}: 6 agree")
            for length in (64, 128, 256, 512, 1024, 2048)
        ),
    ],
)
def test_the_larger_scale_holds_as_the_page_says(folder: str, verdict: str) -> None:
    report = (ROOT / f"notebooks/reproduction/{folder}/report.md").read_text(encoding="utf-8")
    assert any(line.startswith(f"- **{verdict}") for line in report.splitlines())


def test_a_wider_start_helps_sinusoidal_positions_alone_at_the_larger_scale() -> None:
    usual, wide = (
        record_of(ROOT / f"notebooks/reproduction/{group}/lex-table2-small")["results"]["books"]["cells"]
        for group in ("books-small", "initializer-0.0625")
    )
    for system, row in usual.items():
        at_l = "1024"  # as printed
        assert (wide[system][at_l]["mean"] < row[at_l]["mean"]) == (system == "Transformer")


def test_the_schemes_behave_as_published() -> None:
    means = comparison().means()
    for system, curve in means.items():
        scheme, is_blockwise = system.removesuffix(" + BCA"), system.endswith(" + BCA")
        if scheme == "learned":
            assert max(curve) == 128
        elif is_blockwise and scheme in ("xpos", "rope"):
            values = list(curve.values())
            assert values == sorted(values, reverse=True), system
        elif not is_blockwise and scheme in ("rope", "sinusoidal"):
            assert curve[2048] > 1.5 * curve[128], system
        elif scheme == "alibi" or (is_blockwise and scheme in ("t5", "kerple", "sandwich", "smoothed_sandwich")):
            assert curve[2048] < 1.02 * curve[128], system
        elif scheme in ("t5", "kerple", "sandwich", "smoothed_sandwich"):
            assert curve[256] < curve[128], system  # beyond that, T5 rises in the paper, too


def test_the_record_shows_what_readme_says() -> None:
    results = json.loads((ROOT / "notebooks/demo/results.json").read_text())
    for system in ("xPos + BCA", "RoPE + BCA"):
        values = list(results["perplexity"][system].values())
        assert values == sorted(values, reverse=True)
    for system, least in (("xPos", 1.05), ("RoPE", 2.5)):
        curve = results["perplexity"][system]
        assert curve["2048"] > least * curve["128"]
    assert results["stream_tokens"] >= 50_000
    assert results["generated_tokens"] == 2000
    assert {*results["cache_bytes"].values()} == {results["generation_cache_bytes"]}


def code(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_pages_without_code_that_runs_are_named() -> None:
    assert {*BEFORE, *NOT_RUN} <= {page.name for page in PAGES if code(page)}


@pytest.mark.processes
@pytest.mark.parametrize(
    "page", [page for page in PAGES if code(page) and page.name not in NOT_RUN], ids=lambda page: page.stem
)
def test_the_code_runs(tmp_path: Path, page: Path) -> None:
    rope_model(attention="sdpa").save_pretrained(tmp_path / "my_llama")
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    (tmp_path / "book.txt").write_text("In a hole in the ground there lived a test. " * 300)
    (tmp_path / "page.py").write_text("\n".join([BEFORE.get(page.name, ""), *code(page)]), encoding="utf-8")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    result = LIBRARIES.run("page.py", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    if page.name == "models.md":
        assert re.search(rf"\d+ tokens read, {2 * 4 * 256 * 224 * 4} bytes of cache", result.stdout)
    if page.name == "training.md":
        assert (tmp_path / "my_model/model.safetensors").is_file()


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_those_of_the_code(name: str) -> None:
    assert (drawings.FOLDER / f"{name}.svg").read_text(encoding="utf-8") == drawings.DRAWINGS[name]()


@pytest.mark.parametrize(
    ("sees", "settings"),
    [
        (drawings.full, {"attention_pattern": "full"}),
        (drawings.sliding, {"attention_pattern": "sliding", "sliding_window": drawings.LENGTH}),
        (drawings.blockwise, {"attention_pattern": "blockwise", "block_length": drawings.LENGTH // 2}),
    ],
)
def test_drawings_show_what_queries_see(sees: drawings.Sees, settings: dict[str, Any]) -> None:
    model = tiny_model(num_hidden_layers=1, training_length=drawings.LENGTH, **settings)
    embeddings = torch.randn(1, drawings.TOKENS, model.config.hidden_size).requires_grad_()
    for query in range(drawings.TOKENS):
        states = model.model(inputs_embeds=embeddings).last_hidden_state
        (found,) = torch.autograd.grad(states[0, query].norm(), embeddings)
        reached = found[0].abs().amax(dim=-1) > 0
        assert reached.tolist() == [sees(query, key) for key in range(drawings.TOKENS)]


def test_drawings_show_what_a_cache_keeps() -> None:
    model = tiny_model(num_hidden_layers=1, training_length=drawings.LENGTH, block_length=drawings.LENGTH // 2)
    for read in range(1, drawings.TOKENS + 1):
        cache = model(random_ids(1, read), use_cache=True).past_key_values
        assert cache.layers[0].fill == drawings.kept(read)

"""Perplexity in two processes: the numbers of one."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.forks import PACKAGE
from helpers.perplexity import TEXTS, compute, lex

from lex_hf.evaluation.perplexity import PROTOCOLS, load_for_evaluation

SHARED = """
import json, os, sys
from pathlib import Path
import evaluate, lex_hf
from lex_hf.cli.commands import app
from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation

evaluate.config.HF_MODULES_CACHE = sys.argv[1] + "/modules"
folder, out, *texts = sys.argv[2:]
out = Path(out)
model, tokenizer = load_for_evaluation(folder, device="cpu")
results = {}
for protocol in ("chunked", "sliding", "last_token", "streaming"):
    result = compute_perplexity(model, tokenizer, texts, protocol=protocol, length=6)
    results[protocol] = result.to_dict()
results["alone"] = compute_perplexity(model, tokenizer, texts[:1], length=6, progress=False).to_dict()
records = out / "records.jsonl"
results["records"] = compute_perplexity(
    model, tokenizer, texts, length=6, records=records, progress=False
).to_dict()
metric = evaluate.load(lex_hf.metric_path(), cache_dir=sys.argv[1])
results["metric"] = metric.compute(predictions=texts, model_id=folder, device="cpu", length=6, progress=False)
rank = os.environ["RANK"]
(out / f"{rank}.json").write_text(json.dumps(results))
(out / "text.txt").write_text(texts[0])
app(["evaluate", folder, str(out / "text.txt"), "--length", "6", "--json"], standalone_mode=False)
"""


def approximately(value: Any) -> Any:
    """The same value, with numbers that other batches may round otherwise."""
    if isinstance(value, dict):
        return {key: approximately(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


@pytest.mark.processes
def test_two_processes_give_the_numbers_of_one(tmp_path: Path, lex_folder: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARED)
    run = PACKAGE.run_together(2, script, tmp_path / "cache", lex_folder, tmp_path, *TEXTS)
    assert run.returncode == 0, run.stderr

    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    model = lex("blockwise")
    for protocol in PROTOCOLS:
        expected = compute(model, TEXTS, protocol=protocol, length=6)
        assert first[protocol] == approximately(expected.to_dict())
    expected = compute(model, TEXTS, length=6)
    for name in ("records", "metric"):
        assert first[name] == approximately(expected.to_dict())
    assert first["alone"] == approximately(compute(model, TEXTS[:1], length=6).to_dict())

    # Each process recorded its share; one process goes on from both files.
    files = [tmp_path / "records.jsonl", tmp_path / "records.jsonl.1"]
    tokens = [[json.loads(line)["tokens"] for line in file.read_text().splitlines()] for file in files]
    assert tokens == [[30, 17, 8], [23, 11]]
    sizes = [file.stat().st_size for file in files]
    fresh, _ = load_for_evaluation(lex_folder, device="cpu")
    again = compute(fresh, TEXTS, length=6, records=files[0])
    assert json.loads(json.dumps(again.to_dict())) == first["records"]
    assert [file.stat().st_size for file in files] == sizes

    # One process shows bars and prints.
    (printed,) = json.loads(run.stdout)
    assert printed == first["alone"]
    assert run.stderr.count("55.0/55.0") == 3, "the share of the first process, for protocols that score all"

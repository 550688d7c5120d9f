"""The metric of evaluate: compute_perplexity under another name."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import evaluate
import pytest
import torch
import torch.nn.functional as F
from helpers.models import tiny_model
from helpers.perplexity import BOS, TOKENIZER, VOCABULARY, Bigram, compute, lex, neox, text_of

import lex_hf
from lex_hf.evaluation.perplexity import PROTOCOLS, compute_perplexity


@pytest.fixture(scope="module")
def metric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[evaluate.EvaluationModule]:
    """The metric as a user loads it; what `evaluate` writes goes to a temporary folder."""
    path = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", path / "modules")
        patch.setattr(sys, "path", [*sys.path])
        yield evaluate.load(lex_hf.metric_path(), cache_dir=str(path))
    for name in [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]:
        del sys.modules[name]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metric_is_compute_perplexity(metric: Any, lex_folder: str, protocol: str) -> None:
    texts = [text_of(50), text_of(31, seed=1) + "né€"]
    options = {"sliding": {"stride": 3}, "last_token": {"contexts": [2, 5]}}.get(protocol, {})
    got = metric.compute(
        predictions=texts, model_id=lex_folder, protocol=protocol, length=8, progress=False, **options
    )
    assert got == compute(lex("blockwise"), texts, protocol=protocol, length=8, **options).to_dict()
    assert got == metric.compute(
        predictions=texts,
        model=lex("blockwise"),
        tokenizer=TOKENIZER,
        protocol=protocol,
        length=8,
        progress=False,
        **options,
    )


def test_metric_passes_every_option_on(metric: Any, lex_folder: str) -> None:
    texts = [text_of(50)]
    options: dict[str, Any] = {"length": 20, "batch_size": 2, "add_start_token": False, "max_length": 45}
    got = metric.compute(
        predictions=texts,
        model_id=lex_folder,
        **options,
        device="cpu",
        dtype="float64",
        trust_remote_code=False,
        attention_pattern="full",
        progress=False,
    )
    full = tiny_model(vocab_size=VOCABULARY, attention_pattern="full", bos_token_id=BOS).double()
    assert got == compute(full, texts, **options).to_dict()
    assert got["perplexity"] != compute(lex("blockwise"), texts, **options).perplexity


def test_metric_passes_the_batch_size_on(metric: Any) -> None:
    model = Bigram()
    metric.compute(predictions=[text_of(9)], model=model, tokenizer=TOKENIZER, length=3, batch_size=2, progress=False)
    assert model.shapes == [(2, 3), (1, 3)]


def test_metric_collects_predictions_in_steps(metric: Any) -> None:
    for text in ("abc", "né"):
        metric.add(prediction=text)
    metric.add_batch(predictions=["xyz"])
    got = metric.compute(model=neox(), tokenizer=TOKENIZER, progress=False)
    assert got == compute(neox(), ["abc", "né", "xyz"]).to_dict()


@torch.no_grad()
def test_metric_is_the_official_formula_for_texts_of_one_segment(metric: Any) -> None:
    """The official metric pads on the right, masks, and averages exp(mean loss) over texts."""
    texts = [text_of(19), "né", text_of(7, seed=1)]
    batch = TOKENIZER(
        [TOKENIZER.bos_token + text for text in texts],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    logits = neox()(**batch).logits[:, :-1]
    mask = batch["attention_mask"][:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none") * mask
    official = torch.exp(loss.sum(1) / mask.sum(1))

    got = metric.compute(predictions=texts, model=neox(), tokenizer=TOKENIZER, progress=False)

    assert got["perplexities"] == pytest.approx(official.tolist(), rel=1e-5)
    assert got["mean_perplexity"] == pytest.approx(official.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either model_id, or both model and tokenizer"),
        ({"model_id": "m", "model": 1}, "either model_id, or both model and tokenizer"),
        ({"model_id": "m", "tokenizer": 1}, "either model_id, or both model and tokenizer"),
        ({"model": 1}, "either model_id, or both model and tokenizer"),
        (
            {"model": 1, "tokenizer": 1, "device": "cpu", "lenght": 3},
            "device, lenght: allowed only with model_id",
        ),
        ({"model_id": "m", "stride": 3}, "stride = 3: the protocol 'chunked' has no such option"),  # before it loads
    ],
)
def test_metric_with_wrong_arguments(metric: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=["abc"], **arguments)


def test_metric_describes_itself(metric: Any) -> None:
    assert "2212.10554" in metric.citation
    assert list(metric.features) == ["predictions"]
    parameters = inspect.signature(compute_perplexity).parameters
    for name in {*parameters, "model_id", "device", "dtype"} - {"model", "tokenizer", "texts"}:
        assert f"    {name} (" in metric.inputs_description

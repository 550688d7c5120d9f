"""The heads for classification and question answering: logits, losses, loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import SIZES, random_ids, tiny_model
from helpers.processes import run_without_lex_hf
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from lex_hf import (
    LexConfig,
    LexForQuestionAnswering,
    LexForSequenceClassification,
    LexForTokenClassification,
)

HEADS = [
    (AutoModelForSequenceClassification, LexForSequenceClassification, {"labels": torch.tensor([0, 2])}),
    (AutoModelForTokenClassification, LexForTokenClassification, {"labels": torch.arange(40).view(2, 20) % 3}),
    (
        AutoModelForQuestionAnswering,
        LexForQuestionAnswering,
        {"start_positions": torch.tensor([1, 4]), "end_positions": torch.tensor([3, 9])},
    ),
]


def outputs_of(output: Any) -> tuple[torch.Tensor, ...]:
    logits = getattr(output, "logits", None)
    return (output.start_logits, output.end_logits) if logits is None else (logits,)


@pytest.mark.parametrize(("auto", "head", "labels"), HEADS)
def test_heads_train_save_and_load(tmp_path: Path, auto: Any, head: Any, labels: dict[str, torch.Tensor]) -> None:
    model, ids = head(LexConfig(**SIZES, num_labels=3)).eval(), random_ids(2, 20)
    output = model(ids, **labels)
    output.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path)
    assert isinstance(loaded, head)
    for found, expected in zip(outputs_of(loaded(ids)), outputs_of(output), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("auto", "head", "labels"), HEADS)
def test_heads_take_the_decoder_of_a_language_model(tmp_path: Path, auto: Any, head: Any, labels: Any) -> None:
    base = tiny_model()
    base.save_pretrained(tmp_path)
    model = auto.from_pretrained(tmp_path, num_labels=3)
    with torch.no_grad():
        expected = base.model(random_ids(1, 20)).last_hidden_state
        assert torch.equal(model.model(random_ids(1, 20)).last_hidden_state, expected)


def test_a_text_is_classified_by_its_last_token_wherever_the_padding_is() -> None:
    torch.manual_seed(0)
    model = LexForSequenceClassification(LexConfig(**SIZES, num_labels=3)).eval()
    text = random_ids(1, 17)
    padding = torch.zeros(1, 6, dtype=torch.long)
    with torch.no_grad():
        alone = model(text).logits
        for ids in (torch.cat((padding, text), dim=1), torch.cat((text, padding), dim=1)):
            padded = model(ids, attention_mask=(ids != 0).long()).logits
            torch.testing.assert_close(padded, alone, atol=1e-5, rtol=0)


@pytest.mark.processes
def test_heads_load_without_lex_hf(tmp_path: Path) -> None:
    for auto, head, _ in HEADS:
        model, folder = head(LexConfig(**SIZES, num_labels=3)).eval(), tmp_path / auto.__name__
        model.save_pretrained(folder)
        with torch.no_grad():
            torch.save(outputs_of(model(random_ids(2, 20))), folder / "expected.pt")
    code = f"""
    import torch
    import transformers
    for auto in {[auto.__name__ for auto, *_ in HEADS]}:
        folder = {str(tmp_path)!r} + "/" + auto
        model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True)
        ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            output = model(ids)
        found = (output.start_logits, output.end_logits) if hasattr(output, "start_logits") else (output.logits,)
        expected = torch.load(folder + "/expected.pt", weights_only=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, expected, strict=True)), auto
    """
    result = run_without_lex_hf(code, tmp_path / "home")
    assert result.returncode == 0, result.stderr

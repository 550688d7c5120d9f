"""What older versions of transformers and PyTorch do otherwise, where the newest are installed."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.models import random_ids, tiny_model
from transformers.generation import GenerationMode

import lex_hf
from lex_hf import LexCache
from lex_hf.model import functions_lex, loss_lex, versions_lex
from lex_hf.model.modeling_lex import AUTO_MAP

CODE = Path(lex_hf.__file__).parent / "model"


@pytest.mark.parametrize("entry", sorted({target.partition(".")[0] for target in AUTO_MAP.values()}))
def test_the_files_that_are_loaded_import_all_that_these_need(entry: str) -> None:
    """Transformers 5.9 copies a file and those that it finds imported there by this very pattern, and no others."""

    def imported(name: str) -> set[str]:
        text = (CODE / f"{name}.py").read_text(encoding="utf-8")
        return set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, flags=re.MULTILINE))

    needed, waiting = set[str](), imported(entry)
    while waiting:
        needed |= waiting
        waiting = set().union(*map(imported, waiting)) - needed
    assert needed - {entry} == imported(entry)
    assert "from . import" not in "".join(path.read_text(encoding="utf-8") for path in CODE.glob("*_lex.py"))


@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)])
def test_chunked_loss_without_pytorch_s_own(items: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_lex, "HAS_CHUNKED_LOSS", False)
    monkeypatch.setattr(loss_lex, "CHUNK", 4)
    ids = random_ids(3, 11)
    labels = ids.masked_fill(random_ids(3, 11, seed=1) % 4 == 0, -100)
    results = []
    for chunked in (False, True):
        model = tiny_model(dtype=torch.float64, chunked_loss=chunked).train()
        loss = model(ids, labels=labels, num_items_in_batch=items).loss
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)  # logits of losses are in float32


def test_caches_remember_where_transformers_does_not_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_model(), random_ids(1, 9)
    for tells in (True, False):
        monkeypatch.setattr(versions_lex, "_TELLS_CACHES", tells)
        found = []
        for mode in (GenerationMode.ASSISTED_GENERATION, GenerationMode.GREEDY_SEARCH):
            given = {"attention_mask": torch.ones_like(ids)}
            model._prepare_cache_for_generation(model.generation_config, given, mode, 1, 40)
            found.append(versions_lex.is_recording_past(given["past_key_values"]))
        assert found == [not tells, False]


def test_flex_attention_that_ignores_biases_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions_lex, "flex_takes_biases", lambda: False)
    given: dict[str, Any] = {}

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        given.update(kwargs, mask=mask)
        return query.transpose(1, 2), None

    function = functions_lex.AttentionFunction("flex_attention")
    monkeypatch.setattr(function, "of", lambda module: attend)
    with pytest.raises(ValueError, match="KERPLE needs a bias for each head, which flex_attention of this version"):
        function.mask(None, torch.zeros(2, 3, 3), torch.float32, ("blocks", "KERPLE"))
    seen = torch.ones(3, 3, dtype=torch.bool).tril()
    mask = function.mask(seen, None, torch.float32, ("blocks", "KERPLE"))
    states = torch.zeros(2, 4, 3, 8)
    function(torch.nn.Identity(), states, states, states, mask, False)
    assert "position_bias" not in given
    assert given["mask"].shape == (2, 1, 3, 3)
    assert torch.equal(given["mask"][1, 0] == 0, seen)


def test_names_of_older_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LexCache(tiny_model(attention_pattern="full").config, max_cache_len=12)
    assert [layer.get_max_cache_shape() for layer in cache.layers] == [12, 12]
    assert versions_lex.cache_classes("DynamicLayer", "no such layer") == versions_lex.cache_classes("DynamicLayer")
    old: Any = SimpleNamespace(is_gradient_checkpointing=True)
    new: Any = SimpleNamespace(is_gradient_checkpointing=False, is_activation_checkpointing=True)
    assert versions_lex.is_checkpointing(old)
    assert versions_lex.is_checkpointing(new)


def test_logits_at_positions_of_each_row() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 9)
    chosen, marks = torch.tensor([[1, 8, 3], [0, 5, 7]]), torch.zeros(2, 9, dtype=torch.bool)
    marks[0, 2:5] = marks[1, 8] = True
    with torch.no_grad():
        logits = model(ids).logits
        found = [model(ids, logits_to_keep=each).logits for each in (chosen, marks, chosen[0], 2)]
    expected = [logits.take_along_dim(chosen[..., None], dim=1), logits[marks], logits[:, chosen[0]], logits[:, -2:]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)

"""Attention functions other than eager and sdpa: exactly what blockwise attention needs, or a clear refusal."""

import functools
from functools import partial
from typing import Any

import pytest
import torch
from helpers.models import random_ids, tiny_model
from torch._inductor import exc
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.flex_attention import WrappedFlexAttention

from lex_hf import LexCache, LexForCausalLM, LexStaticCache
from lex_hf.model import functions_lex
from lex_hf.model.versions_lex import flex_takes_biases

FLASH = "flash_attention_by_the_book"


def flash_by_the_book(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What flash attention computes: no mask, and causality counted from the last key back."""
    assert attention_mask is None
    scores = query @ key.transpose(2, 3) * scaling
    if is_causal:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2), None


AttentionInterface.register(FLASH, flash_by_the_book)


def with_function(name: str, **fields: Any) -> LexForCausalLM:
    model = tiny_model(dtype=torch.float64, **fields)
    model.config._attn_implementation = name
    return model


@pytest.mark.parametrize("fields", [{}, {"attention_pattern": "full"}, {"position_embedding_type": "sinusoidal"}])
def test_flash_attention_needs_no_mask_for_blocks(fields: dict[str, Any]) -> None:
    ids, model = random_ids(2, 40), with_function(FLASH, **fields)
    with torch.no_grad():
        expected = tiny_model(dtype=torch.float64, **fields)(ids).logits
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-9, rtol=0)
        for size in (1, 3, 7, 18):
            outputs, cache = [], None
            for start in range(0, 40, size):
                output = model(ids[:, start : start + size], past_key_values=cache)
                outputs.append(output.logits)
                cache = output.past_key_values
            torch.testing.assert_close(torch.cat(outputs, dim=1), expected, atol=1e-9, rtol=0)


def test_flash_attention_reads_padded_batches() -> None:
    ids, mask = random_ids(2, 40), torch.ones(2, 40)
    mask[1, :9] = 0
    with torch.no_grad():
        expected = tiny_model(dtype=torch.float64)(ids, attention_mask=mask).logits
        logits = with_function(FLASH)(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("fields", "inputs", "what"),
    [
        ({"position_embedding_type": "alibi"}, {}, "AlibiScheme needs one"),
        ({"position_embedding_type": "alibi", "attention_pattern": "full"}, {}, "AlibiScheme needs one"),
        ({"position_embedding_type": "shaw", "attention_pattern": "full"}, {}, "ShawScheme needs one"),
        ({"attention_pattern": "sliding"}, {}, "sliding attention in this batch needs one"),
        ({}, {"position_ids": torch.arange(40)[None] % 20}, "blockwise attention in this batch needs one"),
    ],
)
def test_flash_attention_is_refused_where_it_would_drop_a_mask(
    fields: dict[str, Any], inputs: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=f"takes no mask, and {what}"):
        with_function(FLASH, **fields)(random_ids(1, 40), use_cache=False, **inputs)


@pytest.mark.parametrize("length", [1, 9])
def test_flash_attention_continues_rows_that_stand_at_different_slots(length: int) -> None:
    """What it cannot take a mask for is either folded, or a single token, which needs no attention function."""
    model, mask, ids = with_function(FLASH), torch.ones(2, 12 + length), random_ids(2, 12 + length)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = tiny_model(dtype=torch.float64)(ids, attention_mask=mask).logits
        cache = model(ids[:, :12], attention_mask=mask[:, :12]).past_key_values
        logits = model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(logits, expected[:, 12:], atol=1e-9, rtol=0)


def test_flash_attention_that_is_not_installed_is_an_error_when_loading(tmp_path: Any) -> None:
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=r"[Ff]lash"):
        LexForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_attention_2")


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own, when it loads its compiler
@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        pytest.param({}, "inductor", marks=pytest.mark.inductor),
        ({"position_embedding_type": "kerple"}, "eager"),
        ({"position_embedding_type": "shaw"}, "eager"),
    ],
)
def test_flex_attention_gives_the_same_logits(
    fields: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that is generated is the same with a bias for each head, which `eager` reads without one."""
    compiled = torch.compile(flex_attention, backend=backend)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: compiled)
    ids, mask = random_ids(2, 160), torch.ones(2, 160)
    mask[1, :20] = 0
    model = tiny_model(hidden_size=96, training_length=64, **fields)  # its CPU kernel wants heads of a usual width
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("flex_attention")
        if fields and not flex_takes_biases():
            with pytest.raises(ValueError, match="needs a bias for each head, which flex_attention of this version"):
                model(ids, attention_mask=mask)
            return
        try:
            logits = model(ids, attention_mask=mask).logits
        except (exc.InvalidCxxCompiler, getattr(exc, "InductorError", exc.InvalidCxxCompiler)):
            pytest.skip("flex_attention is compiled, and there is no C++ compiler here")
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], atol=5e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["none", "boolean", "added", "by head"])
@pytest.mark.parametrize("ends", [None, (3, 11), (14, 7), (13, 11), (6, 7)])
def test_single_queries_row_by_row(
    dtype: torch.dtype, parts: int, kind: str, ends: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed row by row, a few heads at a time, against float64."""
    monkeypatch.setattr(functions_lex, "PART", 2 * 14 * 10)  # two of the three heads of keys at once
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 6, 1, 10), (2, 3, 14, 10), (2, 3, 14, 7))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    scales = torch.rand(2, 1, parts, 10, generator=generator) + 0.5 if parts > 1 else None
    masks = {
        "none": None,
        "boolean": torch.rand(2, 1, 1, 14, generator=generator) < 0.6,
        "added": torch.randn(2, 1, 1, 14, generator=generator).to(dtype),
        "by head": torch.randn(2, 6, 1, 14, generator=generator).to(dtype),
    }
    mask = masks[kind]
    for row, end in enumerate(ends or ()):
        if mask is not None:
            mask[row, ..., end:] = False if kind == "boolean" else torch.finfo(dtype).min
    suits = functools.partial(functions_lex.suits_rows, query, key, value, ends, scaling=0.3)
    is_faster = ends is not None or dtype in (torch.bfloat16, torch.float16)
    assert not torch.is_grad_enabled() or not suits()
    with torch.no_grad():
        assert suits(dropout=0.0, softcap=None) == is_faster
        assert not suits(softcap=2.0)
        assert not suits(dropout=0.1)
        output = functions_lex.attend_by_row(query, key, value, mask, ends, scaling=0.3, scales=scales)
    exact = [states.double() for states in (query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1))]
    factors = torch.ones(2, 1, 1, 10) if scales is None else scales
    asked = (exact[0] * factors).repeat_interleave(14 // factors.shape[2], dim=2)
    scores = (asked * exact[1]).sum(-1)[:, :, None] * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if kind == "boolean" else scores + mask
    for row, end in enumerate(ends or ()):
        scores[row, :, :, end:] = float("-inf")
    expected = scores.softmax(-1) @ exact[2]
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    torch.testing.assert_close(output.double(), expected.double(), atol=1e-5, rtol=torch.finfo(dtype).eps)


class Calls(TorchDispatchMode):
    """Notes the dtypes of softmax, and calls of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "attention" in str(func) or "softmax" in str(func):
            self.seen.add(f"{func} {args[0].dtype}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [LexCache, partial(LexStaticCache, max_cache_len=40)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_which_steps_are_computed_in_float32(make: Any, dtype: torch.dtype) -> None:
    model, ids = tiny_model(dtype=dtype), random_ids(2, 21)
    cache = make(model.config)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        with Calls() as calls:
            model(ids[:, 20:], past_key_values=cache)
    fused = any("attention" in each for each in calls.seen)
    assert fused == (dtype == torch.float32 and make is LexCache)
    assert fused or calls.seen == {"aten._softmax.default torch.float32"}

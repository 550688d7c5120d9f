"""The model against a dense reference: patterns, padding, packing, gradients, dtypes, and bad input."""

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from helpers import reference
from helpers.models import (
    ABLATIONS,
    HYBRID,
    MIXED,
    PATTERNS,
    SCHEMES,
    SIZES,
    TOLERANCE,
    dense_logits,
    enable_checkpointing,
    pattern_fields,
    quick,
    random_ids,
    scheme_fields,
    settings_of,
    tiny_model,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from lex_hf import LexCache, LexConfig, LexForCausalLM, LexStaticCache
from lex_hf.model import layers_lex, modeling_lex

implementations = st.sampled_from(["eager", "sdpa"])


def padded(texts: list[torch.Tensor], places: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put each text at the given columns of a row; return ids and attention mask."""
    width = 1 + max(int(place.max()) for place in places)
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        ids[row, place], mask[row, place] = text, 1
    return ids, mask


@pytest.mark.parametrize("fields", PATTERNS + ABLATIONS + SCHEMES + MIXED + (HYBRID,))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_match_the_dense_reference(fields: dict[str, Any], attention: str) -> None:
    model = tiny_model(dtype=torch.float64, attn_implementation=attention, **fields)
    assert model.config._attn_implementation == attention
    ids = random_ids(2, 50)
    expected = torch.stack([dense_logits(model, row) for row in ids])
    with torch.no_grad():
        for length in (1, 6, 7, 8, 13, 14, 15, 20, 21, 28, 35, 50):
            logits = model(ids[:, :length]).logits
            torch.testing.assert_close(logits, expected[:, :length], atol=1e-9, rtol=0)


def test_the_reference_tells_patterns_and_schemes_apart() -> None:
    kinds = (*PATTERNS, *ABLATIONS, *SCHEMES, *MIXED, HYBRID)
    variants = [tiny_model(dtype=torch.float64, **fields) for fields in kinds]
    logits = [dense_logits(model, random_ids(50))[-1] for model in variants]
    same = [(i, j) for i in range(len(logits)) for j in range(i) if (logits[i] - logits[j]).abs().max() < 1e-3]
    assert same == [(9, 6)]  # xPos with ζ = 1 is RoPE


@quick
@given(fields=pattern_fields, attention=implementations, data=st.data())
def test_padding_anywhere_changes_nothing(fields: dict[str, Any], attention: str, data: st.DataObject) -> None:
    model = tiny_model(dtype=torch.float64, attn_implementation=attention, **fields)
    width = data.draw(st.integers(1, 40), label="width")
    columns = st.sets(st.integers(0, width - 1), min_size=1)
    places = [torch.tensor(sorted(data.draw(columns))) for _ in range(3)]
    texts = [random_ids(len(place), seed=row) for row, place in enumerate(places)]
    ids, mask = padded(texts, places)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, use_cache=False).logits
    assert logits.isfinite().all()
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        torch.testing.assert_close(logits[row, place], dense_logits(model, text), atol=1e-9, rtol=0)


@quick
@given(
    fields=pattern_fields,
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=5),
    rows=st.integers(1, 2),
)
def test_packed_documents_never_mix(fields: dict[str, Any], lengths: list[int], rows: int) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    texts = [[random_ids(n, seed=10 * row + i) for i, n in enumerate(lengths)] for row in range(rows)]
    ids = torch.stack([torch.cat(row) for row in texts])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    expected = torch.stack([torch.cat([dense_logits(model, text) for text in row]) for row in texts])
    with torch.no_grad():
        for mask in (None, torch.ones_like(ids)):
            outputs = model(ids, attention_mask=mask, position_ids=positions)
            torch.testing.assert_close(outputs.logits, expected, atol=1e-9, rtol=0)
            assert outputs.past_key_values is None


def test_positions_that_only_start_elsewhere_are_one_document() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 31)
    with torch.no_grad():
        moved = model(ids, position_ids=torch.arange(31)[None] + 1000).logits
        torch.testing.assert_close(moved, model(ids).logits, atol=1e-12, rtol=0)


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_match_the_dense_reference(fields: dict[str, Any], checkpointing: bool) -> None:
    model = tiny_model(dtype=torch.float64, attn_implementation="sdpa", **fields).train()
    if checkpointing:
        enable_checkpointing(model)
    ids = random_ids(45)
    logits = model(ids[None]).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    logits = reference.forward(weights, ids, settings_of(model))
    torch.nn.functional.cross_entropy(logits[:-1], ids[1:]).backward()
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight.grad, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", PATTERNS)
def test_other_dtypes_match_within_their_precision(fields: dict[str, Any], dtype: torch.dtype) -> None:
    model, ids = tiny_model(dtype=dtype, xpos_scale_base=30, **fields), random_ids(1, 60)
    expected = dense_logits(model, ids[0])  # the same rounded weights
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.dtype == dtype
    torch.testing.assert_close(logits[0].double(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_attention_weights_have_the_documented_shape_and_values() -> None:
    model = tiny_model(dtype=torch.float64, attn_implementation="eager")
    ids, mask = padded([random_ids(50), random_ids(33)], [torch.arange(50), torch.arange(17, 50)])
    cache = LexCache(model.config)
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask, output_attentions=True, output_hidden_states=True)
        model(ids[:1, :20], past_key_values=cache)
        continued = model(ids[:1, 20:], past_key_values=cache, output_attentions=True)
    assert [tuple(weights.shape) for weights in outputs.attentions] == [(2, 3, 50, 50)] * 2
    assert [tuple(states.shape) for states in outputs.hidden_states] == [(2, 50, 30)] * 3
    seen = outputs.attentions[0] > 0
    allowed = reference.visible("blockwise", 50, 7)
    assert torch.equal(seen[0], allowed.expand(3, 50, 50))
    assert torch.equal(seen[1, :, 17:, 17:], allowed[:33, :33].expand(3, 33, 33))
    assert not seen[1, :, 17:, :17].any()
    # After 20 tokens in blocks of 7, tokens 7 … 19 are in the cache.
    assert continued.attentions[0].shape == (1, 3, 30, 13 + 30)
    torch.testing.assert_close(continued.attentions[0], outputs.attentions[0][:1, :, 20:, 7:], atol=1e-12, rtol=0)


@pytest.mark.parametrize("pattern", ["blockwise", "sliding", "full"])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("pieces", [[9, 1, 1, 1], [4, 5, 3], [1, 11]])
def test_attention_weights_have_one_layout_in_prefill_chunks_and_steps(
    pattern: str, static: bool, pieces: list[int]
) -> None:
    """Within the first pair of blocks all keys are kept, so all weights are those of one pass, column by column."""
    model = tiny_model(dtype=torch.float64, attn_implementation="eager", attention_pattern=pattern)
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :4], mask[2, :8] = 0, 0
    cache = LexStaticCache(model.config, 12) if static else LexCache(model.config)
    start = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, output_attentions=True, use_cache=False).attentions[0]
        for piece in pieces:
            stop = start + piece
            known = {"attention_mask": mask[:, :stop], "past_key_values": cache, "output_attentions": True}
            found = model(ids[:, start:stop], **known).attentions[0]
            real = mask[:, start:stop] == 1
            for row in range(3):
                shown = found[row, :, real[row], -min(stop, found.shape[-1]) :]
                torch.testing.assert_close(shown, expected[row, :, start:stop, :stop][:, real[row]])
                torch.testing.assert_close(found[row, :, real[row]].sum(-1), torch.ones_like(shown[..., 0]))
            start = stop


def test_attentions_can_be_asked_for_in_the_config_and_need_eager_attention(caplog: pytest.LogCaptureFixture) -> None:
    model = LexForCausalLM(LexConfig(**SIZES, output_attentions=True))
    assert model(random_ids(1, 20)).attentions[0].shape == (1, 3, 20, 20)
    modeling_lex.logger.warning_once.cache_clear()
    assert not tiny_model(attn_implementation="sdpa")(random_ids(1, 4), output_attentions=True).attentions
    assert "no attention weights are returned, because 'sdpa' attention has none" in caplog.text


def test_logits_to_keep_and_labels() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 20)
    with torch.no_grad():
        everything = model(ids, labels=ids)
        last = model(ids, logits_to_keep=3).logits
        loss = torch.nn.functional.cross_entropy(everything.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(last, everything.logits[:, -3:])
    assert everything.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert isinstance(model(ids, return_dict=False), tuple)


class LargestTensor(TorchFunctionMode):
    """Remembers the largest result of any torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("layout", ["plain", "left-padded", "packed"])
@pytest.mark.parametrize("pattern", ["blockwise", "sliding"])
@pytest.mark.parametrize("scheme", ["xpos", "alibi", "t5", "shaw", "sinusoidal"])
def test_no_tensor_grows_with_the_square_of_the_length(attention: str, layout: str, pattern: str, scheme: str) -> None:
    sizes_of_model = {"vocab_size": 11, "num_attention_heads": 1, "hidden_size": 10}
    fields = {"attention_pattern": pattern, "position_embedding_type": scheme, **sizes_of_model}
    model = tiny_model(attn_implementation=attention, **fields)
    sizes = []
    for length in (700, 2800):
        ids, largest = random_ids(1, length, vocab_size=11), LargestTensor()
        mask = (torch.arange(length) >= 30).long()[None] if layout == "left-padded" else None
        positions = torch.arange(length)[None] % 100 if layout == "packed" else None
        with torch.no_grad(), largest:
            model(ids, attention_mask=mask, position_ids=positions)
        sizes.append(largest.elements)
    assert sizes[1] < 4.3 * sizes[0]


def test_evaluating_first_does_not_prevent_training() -> None:
    model, ids = tiny_model(), random_ids(1, 40)
    with torch.inference_mode():
        cache, expected = model(ids[:, :20]).past_key_values, model(ids).logits[:, 20:]
    model(ids, labels=ids, use_cache=False).loss.backward()
    with torch.no_grad():  # and a text begun in inference mode can be continued outside of it
        torch.testing.assert_close(model(ids[:, 20:], past_key_values=cache).logits, expected)


def test_a_forward_pass_that_caches_can_still_be_trained() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(2, 40)
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    for length in (40, 9):
        model.zero_grad()
        outputs = model(ids[:, :length], labels=ids[:, :length])
        assert outputs.past_key_values.get_seq_length() == length
        assert not outputs.past_key_values.layers[0].keys.requires_grad
        model(ids[:, :3], past_key_values=outputs.past_key_values)  # writing on must not disturb the gradients
        outputs.loss.backward()
        if length == 40:
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("fields", [{"hidden_dropout": 0.5}, {"attention_dropout": 0.5}])
def test_dropout_acts_in_training_only(fields: dict[str, Any]) -> None:
    model, ids = tiny_model(**fields), random_ids(1, 30)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
        model.train()
        assert not torch.equal(model(ids).logits, model(ids).logits)


def test_dropout_follows_the_embedding_the_attention_and_the_feed_forward_layer() -> None:
    model, calls = tiny_model(hidden_dropout=0.5).train(), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    model(random_ids(1, 30))
    assert calls == ["model.dropout", *(f"model.layers.{i}.dropout" for i in (0, 0, 1, 1))]


BAD_INPUT = {
    "an id beyond the vocabulary": ({"input_ids": torch.tensor([[3, 97]])}, r"hold 97; .* ids 0 to 96"),
    "a negative id": ({"input_ids": torch.tensor([[3, -1]])}, r"hold -1; .* ids 0 to 96"),
    "no tokens": ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"empty: its shape is \(1, 0\)"),
    "no rows": ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"empty: its shape is \(0, 4\)"),
    "nothing": ({}, "exactly one of input_ids and inputs_embeds"),
    "both kinds of input": (
        {"input_ids": torch.ones(1, 2, dtype=torch.long), "inputs_embeds": torch.ones(1, 2, 30)},
        "exactly one of input_ids and inputs_embeds",
    ),
    "a row of padding": (
        {
            "input_ids": torch.ones(2, 3, dtype=torch.long),
            "attention_mask": torch.tensor([[0, 1, 1], [0, 0, 0]]),
        }
        | {"use_cache": False},
        "Row 1 of attention_mask has no 1",
    ),
    "a mask of another length": (
        {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 4)},
        r"shape \(1, 4\); it must be .* \(1, 3\)",
    ),
    "a mask of four dimensions": (
        {"input_ids": torch.ones(1, 3, dtype=torch.long), "attention_mask": torch.ones(1, 1, 3, 3)},
        "LEX makes its own causal masks",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused(case: str) -> None:
    inputs, message = BAD_INPUT[case]
    with pytest.raises(ValueError, match=message):
        tiny_model()(**inputs)


def test_packed_rows_cannot_continue_a_cache() -> None:
    model, ids = tiny_model(), random_ids(1, 6)
    with pytest.raises(ValueError, match="packs several documents"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), past_key_values=LexCache(model.config))


def test_xpos_with_full_attention_says_where_it_ends() -> None:
    model = tiny_model(dtype=torch.float16, attention_pattern="full")
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"reaches (\d+) tokens in float16; this text has 200") as caught:
            model(random_ids(1, 200))
        limit = int(str(caught.value).split("reaches ")[1].split()[0])
        assert model(random_ids(1, limit)).logits.isfinite().all()
        tiny_model(dtype=torch.float16, attention_pattern="full", position_embedding_type="rope")(random_ids(1, 200))


def test_position_bias_is_zero_for_schemes_that_turn() -> None:
    bias = tiny_model().position_bias(torch.arange(4), torch.arange(5))
    assert torch.equal(bias, torch.zeros(3, 4, 5))


@pytest.mark.parametrize("extra", [{}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(17)}])
def test_the_chunked_loss_is_the_loss_and_has_its_gradients(extra: dict[str, Any]) -> None:
    ids, results = random_ids(3, 40), []
    labels = ids.masked_fill(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.3, -100)
    for chunked in (False, True):
        model = tiny_model(tie_word_embeddings=True, chunked_loss=chunked).train()
        output = model(ids, labels=labels, use_cache=False, **extra)
        output.loss.backward()
        assert (output.logits is None) == chunked
        results.append((output.loss, dict(model.named_parameters())))
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-5, rtol=0)
    for name, parameter in results[0][1].items():
        torch.testing.assert_close(results[1][1][name].grad, parameter.grad, atol=1e-4, rtol=0)
    with torch.no_grad():
        assert model.eval()(ids, labels=labels).logits.shape == (3, 40, 97)


@pytest.mark.parametrize(("rows", "length"), [(1, 41), (2, 24), (3, 5)])
def test_many_tokens_take_the_feed_forward_layer_in_parts(
    monkeypatch: pytest.MonkeyPatch, rows: int, length: int
) -> None:
    monkeypatch.setattr(layers_lex, "_MLP_TOKENS", 8)
    layer = tiny_model().model.layers[0].mlp
    sizes: list[int] = []
    layer.up_proj.register_forward_hook(lambda module, inputs, output: sizes.append(inputs[0].shape[-2]))
    states = torch.randn(rows, length, 30).transpose(0, 1).contiguous().transpose(0, 1)
    whole = layer(states)  # gradients are wanted: in one piece
    with torch.no_grad():
        parts = layer(states)
    assert sizes == [length, *[8] * (rows * length // 8), *([rows * length % 8] if rows * length % 8 else [])]
    torch.testing.assert_close(parts, whole)


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_lex, "CHUNK", 20)


def calls_of(module: torch.nn.Module) -> list[tuple[int, int]]:
    """Rows and columns of each call of a module from now on."""
    calls: list[tuple[int, int]] = []
    module.register_forward_hook(lambda module, inputs, output: calls.append(tuple(inputs[0].shape[:2])))
    return calls


@quick
@given(
    st.sampled_from([fields for fields in PATTERNS if fields["attention_pattern"] != "full"]),
    st.one_of(st.just({}), scheme_fields),
    implementations,
    st.integers(1, 3),
    st.integers(0, 60),
    st.integers(21, 90),
)
def test_long_texts_are_read_in_chunks_with_the_same_result(
    pattern: dict[str, Any], scheme: dict[str, Any], implementation: str, rows: int, before: int, length: int
) -> None:
    fields = {"training_length": 14} | scheme
    model = tiny_model(**fields | pattern, attn_implementation=implementation, dtype=torch.float64)
    if scheme.get("position_embedding_type") == "learned":
        before, length = min(before, 20), min(length, 75)
    ids, more = random_ids(rows, before + length), random_ids(rows, 3, seed=1)
    calls = calls_of(model.model.layers[0].mlp)

    def read(chunk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(modeling_lex, "CHUNK", chunk)
            cache = LexCache(model.config)
            if before:
                model(ids[:, :before], past_key_values=cache)
            calls.clear()
            logits = model(ids[:, before:], past_key_values=cache).logits
            following = model(more, past_key_values=cache).logits
            return logits, following, model(ids, use_cache=False).logits

    whole = read(1000)
    assert [columns for _, columns in calls] == [length, 3, before + length]
    chunks = read(20)
    if length > max(20 // rows, model.config.attention_span(model.config.layer_patterns[0]) or 0):
        assert calls[0][1] < length
        assert calls[0][0] == rows
    for one, other in zip(whole, chunks, strict=True):
        torch.testing.assert_close(other, one, atol=TOLERANCE[torch.float64], rtol=0)


@pytest.mark.usefixtures("short_chunks")
def test_only_what_is_no_gain_or_wants_all_at_once_is_not_read_in_chunks() -> None:
    model, ids = tiny_model(attn_implementation="eager"), random_ids(2, 40)
    calls = calls_of(model.model.layers[0].self_attn.q_proj)
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        assert [tuple(each.shape) for each in states] == [(2, 40, 30)] * 3
        assert calls == [(2, 40)]
        calls.clear()
        # Afterwards, transformers leaves its hooks where they are.
        assert model(ids, use_cache=False).past_key_values is None
        assert calls == [(2, 7)] * 5 + [(2, 5)]
        calls.clear()
        assert model(ids, output_attentions=True).attentions[0].shape == (2, 3, 40, 40)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        model(ids, attention_mask=mask)
        model(ids, position_ids=torch.arange(20).repeat(2)[None])
        model(ids, past_key_values=LexStaticCache(model.config, 40))
        ragged = LexCache(model.config)
        model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=ragged)
        calls[-1:] = []
        model(ids, past_key_values=ragged)
    model(ids)
    assert calls == [(2, 40)] * 6


@pytest.mark.usefixtures("short_chunks")
def test_hooks_on_layers_and_embeddings_of_the_user_see_whole_texts() -> None:
    model, ids = tiny_model(), random_ids(2, 40)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(ids)
        before, expected = embeddings.clone(), model(ids).logits
        torch.testing.assert_close(model(inputs_embeds=embeddings).logits, expected)
        assert torch.equal(embeddings, before), "pieces are written in place, but not into the caller's tensor"
        calls = calls_of(model.model.layers[1])
        torch.testing.assert_close(model(ids).logits, expected)
    assert calls == [(2, 40)]


@pytest.mark.usefixtures("short_chunks")
def test_weights_that_wait_elsewhere_are_fetched_once_for_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_lex, "_MLP_TOKENS", 8)
    model, ids = tiny_model(), random_ids(1, 40)
    with torch.no_grad():
        expected = model(ids).logits
        offloaded = cpu_offload(model, execution_device="cpu", offload_buffers=False)
        layer = offloaded.model.layers[0]
        calls = [calls_of(module) for module in (layer.self_attn.q_proj, layer.mlp.up_proj)]
        torch.testing.assert_close(offloaded(ids).logits, expected)
    assert calls == [[(1, 40)], [(1, 40)]]


def test_training_with_checkpointing_makes_no_cache() -> None:
    """Layers that are computed again would write to it again."""
    model, ids = tiny_model(), random_ids(2, 20)
    enable_checkpointing(model)
    assert model(ids).past_key_values.get_seq_length() == 20
    model.train()
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values is None

"""Blockwise attention for other models: logits of a dense mask of blocks in the model's own attention."""

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.models import NEVER, enable_checkpointing, needs_whole_graphs
from helpers.rope_models import LENGTH, VOCABULARY, dense_mask, rope_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaModel,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5Model,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lex_hf import LexConfig, LexForCausalLM, blockwise, restore

BLOCK = LENGTH // 2
TOLERANCE = {"atol": 2e-5, "rtol": 0}
KINDS = ["llama", "gpt_neox", "glm4", "llama4_text"]


def ids_of(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def expected_logits(model: PreTrainedModel, ids: torch.Tensor, block: int = BLOCK, **kwargs: Any) -> torch.Tensor:
    """Logits of a model that is as transformers made it."""
    mask = dense_mask(ids.shape[1], block).expand(len(ids), -1, -1, -1)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False, **kwargs).logits


def read(model: PreTrainedModel, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor | None = None) -> Any:
    """Logits of a text that is read in pieces, with the last cache."""
    cache, logits, end = None, [], 0
    with torch.no_grad():
        for piece in ids.split(pieces, dim=1):
            end += piece.shape[1]
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            output = model(piece, past_key_values=cache, use_cache=True, **given)
            cache = output.past_key_values
            logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_dense_mask(kind: str, attention: str) -> None:
    model, ids = rope_model(kind, attention), ids_of(2, 6 * BLOCK + 3)
    expected = expected_logits(model, ids)
    assert not torch.allclose(model(ids).logits, expected, **TOLERANCE)
    blockwise(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **TOLERANCE)
        torch.testing.assert_close(model(ids).logits, expected, **TOLERANCE)
    short = ids[:, :LENGTH]
    torch.testing.assert_close(model(short).logits, restore(model)(short).logits, **TOLERANCE)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # of PyTorch itself
def test_flex_attention_gives_the_same_logits() -> None:
    """Without a compiler, which takes seconds and needs another one for C++."""
    ids, mask = ids_of(2, 6 * BLOCK + 3), torch.ones(2, 6 * BLOCK + 3, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        flex, eager = (blockwise(rope_model("llama", attention)) for attention in ("flex_attention", "eager"))
        found, expected = (model(ids, attention_mask=mask).logits[mask == 1] for model in (flex, eager))
    torch.testing.assert_close(found, expected, **TOLERANCE)


@functools.cache
def with_and_without_blocks(kind: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two that are only read with."""
    return blockwise(rope_model(kind)), rope_model(kind)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(KINDS),
    pieces=st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=7),
    padded=st.lists(st.integers(0, 30), max_size=12),
    seed=st.integers(0, 99),
)
def test_pieces_and_padding_change_nothing(kind: str, pieces: list[int], padded: list[int], seed: int) -> None:
    """Each row of a batch with padding anywhere gives the logits that its text gives alone."""
    (model, plain), tokens = with_and_without_blocks(kind), sum(pieces)
    ids = ids_of(3, tokens, seed)
    mask = torch.ones_like(ids)
    for place in padded:
        mask[1 + place % 2, place % tokens] = 0
    mask[:, 0] = torch.where(mask.sum(dim=1) == 0, 1, mask[:, 0])
    alone = [expected_logits(plain, row[seen == 1][None])[0] for row, seen in zip(ids, mask, strict=True)]
    whole, _ = read(model, ids, [tokens], mask)
    for found in (whole, read(model, ids, pieces, mask)[0]):
        for row, seen, expected in zip(found, mask, alone, strict=True):
            torch.testing.assert_close(row[seen == 1], expected, **TOLERANCE)


def test_attention_weights_are_those_of_a_dense_mask() -> None:
    model, ids = rope_model(), ids_of(2, 3 * BLOCK + 2)
    mask = dense_mask(ids.shape[1], BLOCK).expand(2, -1, -1, -1)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False, output_attentions=True).attentions
        blockwise(model)
        found = model(ids, use_cache=False, output_attentions=True).attentions
        assert model(ids, use_cache=False).attentions is None
        padded = torch.cat((torch.zeros_like(ids[:, :3]), ids), dim=1)
        columns = (torch.arange(padded.shape[1]) >= 3).long().expand(2, -1)
        left = model(padded, attention_mask=columns, use_cache=False, output_attentions=True).attentions
    for one, other, third in zip(found, expected, left, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)
        torch.testing.assert_close(third[:, :, 3:, 3:], other, **TOLERANCE)


def test_packed_rows_know_their_own_document_only() -> None:
    model, ids = rope_model(), ids_of(2, 30)
    positions = torch.cat((torch.arange(11), torch.arange(19)))[None].repeat(2, 1)
    positions[1] = torch.cat((torch.arange(24), torch.arange(6)))
    documents = (positions == 0).cumsum(dim=1)
    with torch.no_grad():
        mask = dense_mask(30, BLOCK, documents)
        expected = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        blockwise(model)
        torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, expected, **TOLERANCE)
        output = model(ids, position_ids=positions)
    torch.testing.assert_close(output.logits, expected, **TOLERANCE)
    assert output.past_key_values is None


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "checkpointing", "re-entrant"])
def test_gradients_are_those_of_a_dense_mask(checkpointing: bool | None) -> None:
    model, ids = rope_model().train(), ids_of(2, 27)
    mask = dense_mask(27, BLOCK).expand(2, -1, -1, -1)
    model(ids, labels=ids, attention_mask=mask, use_cache=False).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    blockwise(model)
    if checkpointing is not None:
        enable_checkpointing(model, use_reentrant=checkpointing)
    # Two passes before the backward one: what is computed again must follow its own plan.
    losses = [model(part, labels=part, use_cache=False).loss for part in (ids, ids[:, :9])]
    (losses[0] + 0 * losses[1]).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_the_cache_from_layers(reentrant: bool) -> None:
    """Transformers then withholds from layers the cache that a model makes by default; padded rows show it."""
    model, ids = blockwise(rope_model().train()), ids_of(2, 27)
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, 9:12] = 0, 0
    gradients = []
    for _ in range(2):
        output = model(ids, labels=torch.where(mask == 1, ids, -100), attention_mask=mask)
        output.loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        enable_checkpointing(model, use_reentrant=reentrant)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_far_positions_are_as_exact_as_near_ones(kind: str) -> None:
    model, ids = blockwise(rope_model(kind)), ids_of(1, 25)
    positions = torch.arange(25)[None]
    with torch.no_grad():
        near, far = (model(ids, position_ids=positions + start).logits for start in (0, 10**8))
    torch.testing.assert_close(far, near, **TOLERANCE)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_frequencies_stay_those_of_the_training_length(scaling: dict[str, Any]) -> None:
    """Frequencies that grow with the text would make its beginning another text."""
    model, ids = rope_model(rope_parameters={"rope_theta": 10000.0, **scaling}), ids_of(1, 40)
    near = torch.arange(40) % BLOCK  # within a pair of blocks of this text, positions are those of a short one
    assert near.max() < LENGTH
    expected = model(ids[:, :LENGTH]).logits
    blockwise(model, LENGTH)
    with torch.no_grad():
        long = model(ids).logits
        first, _ = read(model, ids, [LENGTH, 32])
    torch.testing.assert_close(long[:, :LENGTH], expected, **TOLERANCE)
    torch.testing.assert_close(first, long, **TOLERANCE)


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_layers_with_a_window_keep_it(kind: str) -> None:
    """Soft caps, learned sinks, and windows within the training length, beside layers with full attention."""
    fields = {"sliding_window": 3, "num_local_experts": 2, "num_experts_per_tok": 1}
    model, ids = rope_model(kind, **fields), ids_of(2, 6 * BLOCK + 1)
    places = torch.arange(ids.shape[1])
    blocks = dense_mask(len(places), BLOCK)
    window = blocks.masked_fill(places[:, None] - places >= 3, torch.finfo(torch.float32).min)
    masks = {"full_attention": blocks.expand(2, -1, -1, -1), "sliding_attention": window.expand(2, -1, -1, -1)}
    with torch.no_grad():
        expected = model(ids, attention_mask=masks, use_cache=False).logits
        blockwise(model, LENGTH)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **TOLERANCE)
    pieces, cache = read(model, ids, [1, 9, 1, 1, 13])
    torch.testing.assert_close(pieces, expected, **TOLERANCE)
    assert len({type(layer) for layer in cache.layers}) == 2


@pytest.mark.parametrize("chosen", [0, 1])
def test_some_layers_may_keep_full_attention(chosen: int) -> None:
    model, ids = rope_model(), ids_of(2, 22)
    blocks, full = dense_mask(22, BLOCK), dense_mask(22, 22)
    by_layer = [blocks if index == chosen else full for index in range(3)]
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask.expand(2, -1, -1, -1)}),
            with_kwargs=True,
        )
        for layer, mask in zip(model.model.layers, by_layer, strict=True)
    ]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        for handle in handles:
            handle.remove()
        blockwise(model, layers=[chosen])
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, **TOLERANCE)
    torch.testing.assert_close(read(model, ids, [7, 1, 1, 13])[0], expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2"])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 5},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda mode: next(iter(mode), "greedy"),
)
def test_generation_with_and_without_cache(kind: str, mode: dict[str, Any]) -> None:
    model = blockwise(rope_model(kind, **({"sliding_window": 3} if kind == "gemma2" else {})))
    rows = 1 if "prompt_lookup_num_tokens" in mode else 2
    prompt, mask = ids_of(rows, 11), torch.ones(rows, 11, dtype=torch.long)
    if rows == 2 and "prefill_chunk_size" not in mode:
        mask[0, :5] = 0
    tokens = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        given = (
            mode if use_cache else {name: mode[name] for name in mode if name in ("num_beams", "do_sample", "top_k")}
        )
        options = {"attention_mask": mask, "max_new_tokens": 40, "eos_token_id": NEVER, **given}
        tokens.append(model.generate(prompt, use_cache=use_cache, **options))
    assert torch.equal(*tokens)


def test_an_assistant_in_blocks_takes_its_guesses_back() -> None:
    model, assistant = blockwise(rope_model()), blockwise(rope_model(num_hidden_layers=1))
    prompt = ids_of(1, 11)
    expected = model.generate(prompt, max_new_tokens=60, do_sample=False, use_cache=False)
    guessing = {
        "num_assistant_tokens": 6,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0,
    }
    assistant.generation_config.update(**guessing)
    found = model.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, expected)


def test_greedy_tokens_over_many_blocks_and_a_cache_of_constant_size() -> None:
    model, prompt = blockwise(rope_model()), ids_of(1, 5)
    output = model.generate(prompt, max_new_tokens=30 * BLOCK, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(model.generate(prompt, max_new_tokens=30 * BLOCK, do_sample=False, use_cache=False), output[0])
    sizes = {layer.nbytes() for layer in output.past_key_values.layers}
    _, short = read(model, prompt, [5])
    assert sizes == {layer.nbytes() for layer in short.layers}


def test_restore_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model, ids = rope_model(), ids_of(1, 30)
    before = model(ids).logits
    state = {name: value.clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.save_pretrained(tmp_path / "before")
    blockwise(model).save_pretrained(tmp_path / "blocks")
    saved = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("before", "blocks")]
    assert saved[0] == saved[1]
    restore(model)
    assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "eager"
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert torch.equal(value, state[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ValueError, match="is not blockwise"):
        restore(model)


def test_two_models_do_not_disturb_each_other() -> None:
    one, other, plain, ids = rope_model(seed=1), rope_model("gpt_neox", seed=2), rope_model(seed=3), ids_of(1, 33)
    expected = [expected_logits(one, ids), expected_logits(other, ids, 2), plain(ids).logits]
    blockwise(one)
    blockwise(other, 4)
    with torch.no_grad():
        for model, logits in zip((one, other, plain, one), [*expected, expected[0]], strict=True):
            torch.testing.assert_close(model(ids).logits, logits, **TOLERANCE)


def test_a_copy_reads_in_blocks_of_its_own() -> None:
    model, ids = blockwise(rope_model()), ids_of(1, 33)
    expected = model(ids).logits
    other = copy.deepcopy(model)
    restore(model)
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, expected, **TOLERANCE)
    restore(other)
    assert torch.equal(other(ids).logits, model(ids).logits)


class TestErrors:
    @pytest.mark.parametrize("length", [0, -2, 7, 2.5, True])
    def test_lengths(self, length: Any) -> None:
        with pytest.raises(ValueError, match=r"training_length = .*: it must be an even number"):
            blockwise(rope_model(), length)

    def test_a_length_beyond_the_training_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        from transformers.utils import logging

        logging.get_logger("transformers").propagate = True
        logging.get_logger("lex_hf").propagate = True
        blockwise(rope_model(), 2 * LENGTH)
        assert "more than the 8 tokens" in caplog.text

    def test_stretched_positions_are_a_warning_until_a_length_is_given(self, caplog: pytest.LogCaptureFixture) -> None:
        from transformers.utils import logging

        logging.get_logger("transformers").propagate = True
        logging.get_logger("lex_hf").propagate = True
        stretched = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}
        parameters = {"rope_theta": 10000.0, **stretched}
        for length, told in (
            (None, "Blocks are for 8 tokens"),
            (LENGTH, ""),
            (4 * LENGTH, ""),
            (6 * LENGTH, "the 32"),
        ):
            caplog.clear()
            model = rope_model(rope_parameters=parameters, max_position_embeddings=4 * LENGTH)
            blockwise(model, length)
            assert told in caplog.text
            assert bool(caplog.text) == bool(told)
        caplog.clear()
        blockwise(rope_model())
        assert not caplog.text

    def test_models(self) -> None:
        with pytest.raises(ValueError, match="it must be a model of transformers"):
            blockwise(torch.nn.Linear(2, 2))  # type: ignore[type-var]
        sizes = {"d_model": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
        with pytest.raises(ValueError, match="encoder-decoder"):
            blockwise(T5Model(T5Config(**sizes)))
        with pytest.raises(ValueError, match="no causal language model"):
            blockwise(LlamaModel(rope_model().config))
        lex = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 9}
        special = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
        with pytest.raises(ValueError, match="A LEX model has blocks of its own"):
            blockwise(LexForCausalLM(LexConfig(**lex, **special)))

    @pytest.mark.parametrize(
        ("kind", "fields", "why"),
        [
            ("gpt2", {"n_positions": 64}, "its positions are absolute"),
            ("gptj", {"rotary_dim": 4}, "it does not leave masks and attention to transformers'"),
            ("mistral", {"sliding_window": 4}, "No layer of this MistralForCausalLM sees more tokens"),
        ],
    )
    def test_architectures(self, kind: str, fields: dict[str, Any], why: str) -> None:
        model, ids = rope_model(kind, **fields), ids_of(1, 6)
        before = model(ids).logits
        with pytest.raises(ValueError, match=why):
            blockwise(model)
        assert torch.equal(model(ids).logits, before)

    def test_a_model_that_does_more_than_attend(self) -> None:
        model, ids = rope_model(), ids_of(1, 6)
        model.model.layers[0].mlp.register_forward_hook(
            lambda module, args, output: output + output.mean(dim=1)[:, None]
        )
        before = model(ids).logits
        with pytest.raises(ValueError, match="its logits in pieces, with a cache, are not those of one pass"):
            blockwise(model)
        assert torch.equal(model(ids).logits, before)
        assert "lex_hf" not in model.config._attn_implementation

    def test_layers(self) -> None:
        with pytest.raises(ValueError, match=r"layers = \[1, 7\]: those with full attention are \[0, 1, 2\]"):
            blockwise(rope_model(), layers=[1, 7])
        with pytest.raises(ValueError, match="is blockwise already"):
            blockwise(blockwise(rope_model()))

    def test_caches_and_masks_of_others(self) -> None:
        one, other, ids = blockwise(rope_model()), blockwise(rope_model(seed=1)), ids_of(1, 6)
        with pytest.raises(ValueError, match="filled by another model"):
            other(ids, past_key_values=one(ids).past_key_values)
        plain = DynamicCache()
        rope_model()(ids, past_key_values=plain)
        with pytest.raises(ValueError, match="holds 6 tokens"):
            one(ids, past_key_values=plain)
        with pytest.raises(ValueError, match="makes its own masks"):
            one(ids, attention_mask=dense_mask(6, 4))
        with pytest.raises(ValueError, match="Row 0 of attention_mask has no 1"):
            one(ids, attention_mask=torch.zeros_like(ids), use_cache=False)

    def test_another_attention_implementation(self) -> None:
        model, ids = blockwise(rope_model()), ids_of(1, 20)
        model.set_attn_implementation("sdpa")
        with pytest.raises(RuntimeError, match="did not read in blocks"):
            model(ids)
        blockwise_model = blockwise(rope_model())
        with pytest.raises(RuntimeError, match="call the model itself"):
            blockwise_model.model.forward(ids)


def test_a_loaded_model_in_half_precision(tmp_path: Path) -> None:
    rope_model().save_pretrained(tmp_path)
    model, ids = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), ids_of(1, 30)
    expected = expected_logits(rope_model(), ids)
    with torch.no_grad():
        found = blockwise(model)(ids).logits
    assert found.dtype == torch.bfloat16
    error = (found.float() - expected).abs().max() / expected.abs().max()
    assert error < 0.1


@needs_whole_graphs
class TestCompile:
    @pytest.mark.parametrize("sinks", [0, 1])
    def test_one_graph_serves_every_step(self, sinks: int) -> None:
        model, ids = blockwise(rope_model("llama", "sdpa"), sinks=sinks), ids_of(2, 11)
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        options = {"max_new_tokens": 21, "do_sample": False, "use_cache": False}
        expected = model.generate(ids, attention_mask=mask, **options)[:, 11:]
        counter = CompileCounterWithBackend("eager")
        step = torch.compile(model, backend=counter, fullgraph=True)
        with torch.no_grad():
            cache = StaticCache(model.config, max_cache_len=64)
            output = model(ids, attention_mask=mask, past_key_values=cache)
            tokens = [output.logits[:, -1:].argmax(dim=-1)]
            for _ in range(20):
                output = step(tokens[-1], past_key_values=output.past_key_values)
                tokens.append(output.logits[:, -1:].argmax(dim=-1))
        assert torch.equal(torch.cat(tokens, dim=1), expected)
        assert counter.frame_count == 1

    def test_a_training_step_has_no_graph_break(self) -> None:
        model, ids = blockwise(rope_model("gpt_neox", "sdpa")).train(), ids_of(2, 27)
        expected = model(ids, labels=ids, use_cache=False).loss
        counter = CompileCounterWithBackend("aot_eager")
        loss = torch.compile(model, backend=counter, fullgraph=True)(ids, labels=ids, use_cache=False).loss
        torch.testing.assert_close(loss, expected, **TOLERANCE)
        loss.backward()
        assert counter.frame_count == 1


def test_a_model_that_is_deleted_leaves_nothing_behind() -> None:
    gc.collect()  # of other tests
    before = set(ALL_ATTENTION_FUNCTIONS.valid_keys())
    model = blockwise(rope_model())
    model(ids_of(1, 9))
    assert set(ALL_ATTENTION_FUNCTIONS.valid_keys()) != before
    del model
    gc.collect()
    assert set(ALL_ATTENTION_FUNCTIONS.valid_keys()) == before

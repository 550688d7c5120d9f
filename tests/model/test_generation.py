"""`generate`: the same tokens with the cache as without, and in a batch as alone."""

import sys
from typing import Any

import pytest
import torch
from helpers.models import NEVER, PATTERNS, left_padded, random_ids, tiny_model

from lex_hf import LexCache, LexStaticCache


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 4},
        {"do_sample": True, "num_return_sequences": 3},
    ],
)
def test_the_cache_changes_no_token(fields: dict[str, Any], mode: dict[str, Any]) -> None:
    model, prompt = tiny_model(dtype=torch.float64, **fields), random_ids(1, 9)
    settings = {"max_new_tokens": 33, "do_sample": False, **mode}  # six blocks in all
    torch.manual_seed(0)
    cached = model.generate(prompt, **settings)
    settings.pop("prefill_chunk_size", None)
    torch.manual_seed(0)
    assert torch.equal(cached, model.generate(prompt, use_cache=False, **settings))
    assert len({tuple(row.tolist()) for row in cached}) == len(cached)


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 2}, {"prefill_chunk_size": 5}])
def test_a_left_padded_batch_generates_what_each_row_generates_alone(
    fields: dict[str, Any], mode: dict[str, Any]
) -> None:
    model = tiny_model(dtype=torch.float64, **fields)
    prompts = [random_ids(n, seed=n) for n in (1, 6, 7, 15, 33)]
    settings = {"max_new_tokens": 30, "do_sample": False, **mode}  # four blocks and more
    together = model.generate(**left_padded(prompts), **settings)[:, 33:]
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], **settings)[0, len(prompt) :]
        assert torch.equal(together[row], alone)


def test_ten_thousand_greedy_tokens_equal_recomputation() -> None:
    """Every token of four rows is the argmax of one pass, without a cache, over all tokens before it."""
    model = tiny_model(training_length=128, xpos_scale_base=64, seed=1)
    settings = {"max_new_tokens": 2_500, "do_sample": False, "return_dict_in_generate": True}
    result = model.generate(random_ids(4, 5), **settings)
    tokens = result.sequences
    assert result.past_key_values.nbytes() == 2 * 2 * 4 * 128 * 30 * 4
    assert tokens.shape == (4, 2_505)
    # Not one token for ever, and not one text.
    assert all(len(part.unique()) > 5 for row in tokens for part in row[5:].split(500))
    assert len({tuple(row[-500:].tolist()) for row in tokens}) == 4
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[:, 4:-1]
        # From scratch, at sampled points: the text up to there and nothing of what follows.
        for stop in (6, 64, 65, 128, 129, 1000, 2049, 2_499):
            alone = model(tokens[:, :stop], use_cache=False, logits_to_keep=1).logits[:, -1]
            assert torch.equal(alone.argmax(-1), tokens[:, stop])
    assert torch.equal(logits.argmax(-1), tokens[:, 5:])


def test_a_returned_cache_continues_the_conversation() -> None:
    model, turn = tiny_model(dtype=torch.float64), random_ids(2, 11, seed=2)
    settings = {"max_new_tokens": 25, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(random_ids(2, 8), **settings)
    history = torch.cat((first.sequences, turn), dim=1)
    continued = model.generate(history, past_key_values=first.past_key_values, **settings)
    anew = model.generate(history, **settings)
    assert torch.equal(continued.sequences, anew.sequences)
    assert continued.past_key_values is first.past_key_values


def test_a_ragged_batch_continues_the_conversation() -> None:
    model = tiny_model(dtype=torch.float64)
    inputs = left_padded([random_ids(n, seed=n) for n in (3, 20, 9)])
    settings = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**inputs, **settings)
    turn = left_padded([random_ids(n, seed=n) for n in (8, 1, 17)])
    history = torch.cat((first.sequences, turn["input_ids"]), dim=1)
    generated = torch.ones(3, 10, dtype=torch.long)
    mask = torch.cat((inputs["attention_mask"], generated, turn["attention_mask"]), dim=1)
    cache = first.past_key_values
    continued = model.generate(history, attention_mask=mask, past_key_values=cache, **settings)
    anew = model.generate(history, attention_mask=mask, use_cache=False, max_new_tokens=10, do_sample=False)
    assert torch.equal(continued.sequences, anew)


@pytest.mark.parametrize("fields", PATTERNS)
def test_guessing_ahead_changes_no_token(fields: dict[str, Any]) -> None:
    """Prompt lookup and an assistant guess wrong most of the time; the cache is rolled back over many borders."""
    model, prompt = tiny_model(dtype=torch.float64, **fields), random_ids(1, 9).repeat(1, 3)
    assistant = tiny_model(dtype=torch.float64, seed=1, **fields)
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": NEVER}
    expected = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **settings), expected)
    for guesser in (assistant, model):
        assert torch.equal(model.generate(prompt, assistant_model=guesser, **settings), expected)


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("padding", [1, 5, 16])
def test_guessing_ahead_after_a_left_padded_prompt_changes_no_token(fields: dict[str, Any], padding: int) -> None:
    model, prompt = tiny_model(dtype=torch.float64, **fields), random_ids(1, 9).repeat(1, 2)
    inputs = {
        "input_ids": torch.cat((torch.zeros(1, padding, dtype=torch.long), prompt), dim=1),
        "attention_mask": torch.cat((torch.zeros_like(prompt[:, :1]).expand(-1, padding), torch.ones_like(prompt)), 1),
    }
    settings = {"max_new_tokens": 38, "do_sample": False, "eos_token_id": NEVER}
    expected = model.generate(prompt, **settings)[0, 18:]
    guessers = (
        {"prompt_lookup_num_tokens": 12},
        {"assistant_model": tiny_model(dtype=torch.float64, seed=1, **fields)},
    )
    for guesser in guessers:
        found = model.generate(**inputs, **guesser, **settings)[0, 18 + padding :]
        assert torch.equal(
            found[:38], expected
        )  # transformers 5.9 writes more, where guesses beyond the end are right


def test_embeddings_beside_ids_are_read_also_where_a_prompt_is_cut_into_chunks() -> None:
    model, ids = tiny_model(dtype=torch.float64), random_ids(1, 16)
    embeds = model.get_input_embeddings()(random_ids(1, 16, seed=7))
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, inputs_embeds=embeds, **settings)
    assert not torch.equal(expected, model.generate(ids, **settings))
    for given in ({"input_ids": ids}, {}):
        found = model.generate(**given, inputs_embeds=embeds, prefill_chunk_size=5, **settings)
        assert torch.equal(found[:, -20:], expected[:, -20:])


@pytest.mark.parametrize("name", ["sliding_window", "hybrid_chunked"])
def test_deprecated_names_of_the_static_cache(name: str) -> None:
    model, ids = tiny_model(), random_ids(1, 9)
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    result = model.generate(ids, cache_implementation=name, **settings)
    assert type(result.past_key_values) is LexStaticCache
    with pytest.raises(ValueError, match="moves the cache off an accelerator"):
        model.generate(ids, cache_implementation=f"offloaded_{name}".replace("sliding_window", "hybrid"), **settings)


def test_generation_from_embeddings_and_with_a_cache_of_ones_own() -> None:
    model, prompt = tiny_model(dtype=torch.float64), random_ids(1, 16)
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(prompt, **settings)
    cache = LexCache(model.config)
    assert torch.equal(model.generate(prompt, past_key_values=cache, **settings), expected)
    assert cache.get_seq_length() == 16 + 19
    embeds = model.get_input_embeddings()(prompt)
    assert torch.equal(model.generate(inputs_embeds=embeds, **settings), expected[:, 16:])


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True}])
def test_eight_prompts_of_one_token_to_five_blocks(mode: dict[str, Any]) -> None:
    model = tiny_model(dtype=torch.float64)
    prompts = [random_ids(n, seed=n) for n in (1, 2, 7, 13, 15, 21, 29, 35)]
    torch.manual_seed(0)
    settings = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, **mode}
    result = model.generate(**left_padded(prompts), output_logits=True, **settings)
    for row, prompt in enumerate(prompts):
        tokens = result.sequences[row, 35:]
        if mode.get("do_sample"):  # draws differ, the distributions must not
            with torch.no_grad():
                alone = model(torch.cat((prompt, tokens))[None]).logits[0, len(prompt) - 1 : -1]
            together = torch.stack([step[row] for step in result.logits])
            torch.testing.assert_close(together, alone.float(), atol=1e-5, rtol=0)
        else:
            assert torch.equal(tokens, model.generate(prompt[None], **settings).sequences[0, len(prompt) :])


def test_what_generate_returns_has_the_documented_shapes() -> None:
    model = tiny_model()
    model.set_attn_implementation("eager")
    outputs = {"output_scores": True, "output_logits": True, "output_attentions": True, "output_hidden_states": True}
    result = model.generate(
        random_ids(2, 9), max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **outputs
    )
    assert [step.shape for step in result.scores] == [(2, 97)] * 12 == [step.shape for step in result.logits]
    lengths = [9] + [1] * 11
    # Slots: what the cache still holds of the text, one or two blocks of 7, and the new token.
    slots = [9, 10, 11, 12, 13, 14, 8, 9, 10, 11, 12, 13]
    for step, (length, seen) in enumerate(zip(lengths, slots, strict=True)):
        assert [state.shape for state in result.hidden_states[step]] == [(2, length, 30)] * 3
        assert [weights.shape for weights in result.attentions[step]] == [(2, 3, length, seen)] * 2
    beams = model.generate(random_ids(2, 9), num_beams=3, max_new_tokens=4, return_dict_in_generate=True, **outputs)
    assert beams.sequences_scores.shape == (2,)
    assert [step.shape for step in beams.scores] == [(6, 97)] * 4


def test_continuous_batching_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved model carries the file of these methods, and not what they call."""
    monkeypatch.setitem(sys.modules, "lex_hf.inference.batching", None)
    for call in (tiny_model().init_continuous_batching, lambda: tiny_model().generate_batch([[1]], max_new_tokens=2)):
        with pytest.raises(ImportError, match="Continuous batching is part of lex_hf: pip install lex-hf"):
            call()


def test_bad_prompts_are_refused() -> None:
    model, ids = tiny_model(), random_ids(2, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="Row 1 of attention_mask has no 1"):
        model.generate(ids, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match="cache_implementation='offloaded' moves the cache off an accelerator"):
        model.generate(ids, cache_implementation="offloaded", max_new_tokens=2)

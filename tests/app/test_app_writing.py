"""Texts continued on the page: the tokens of `generate`, without an end, in constant memory."""

from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from helpers.models import BYTES, tiny_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lex_hf import blockwise
from lex_hf.app import writing
from lex_hf.app.desk import Desk
from lex_hf.app.settings import Settings, sharing_weights
from lex_hf.app.turns import Turns
from lex_hf.app.writing import Sampling, Written, write

TEXT = "A beginning of more tokens than two blocks, which is read in pieces. "
TOKENS = 50


def written(desk: Desk, name: str, sampling: Sampling, tokens: int = TOKENS, seed: int = 5) -> Written:
    states = desk.write(TEXT, name, sampling, torch.Generator().manual_seed(seed))
    return next(state for state in states if state.tokens == tokens)


def generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 5, **options: Any) -> str:
    torch.manual_seed(seed)
    inputs = tokenizer(TEXT, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=TOKENS, eos_token_id=None, suppress_tokens=[256], top_k=0, **options
    )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.parametrize("name", ["full", "sliding", "blockwise"])
def test_tokens_are_those_of_generate(name: str, lex: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny_model(**BYTES, attention_pattern=name)
    desk = Desk(lex, tokenizer)
    sampled = generated(model, tokenizer, do_sample=True, temperature=0.7, top_p=0.8)
    assert whole(written(desk, name, Sampling(0.7, 0.8)).text, sampled)
    assert not whole(written(desk, name, Sampling(0.7, 0.8), seed=6).text, sampled)
    assert whole(written(desk, name, Sampling(0.0)).text, generated(model, tokenizer, do_sample=False))


def test_tokens_of_a_llama_are_those_of_generate(llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model = blockwise(sharing_weights(llama), sinks=4)
    sampled = generated(model, tokenizer, do_sample=True, temperature=1.3, top_p=1.0)
    assert whole(written(Desk(llama, tokenizer), "blockwise-sinks", Sampling(1.3, 1.0)).text, sampled)


def whole(text: str, expected: str) -> bool:
    """Whether a text is the expected one, but for a character at its end that may not be whole yet."""
    return len(text) > 5 and expected.startswith(text) and set(expected[len(text) :]) <= {"\N{REPLACEMENT CHARACTER}"}


def test_memory_is_constant_in_blocks_and_grows_without(lex: PreTrainedModel, tokenizer: Any) -> None:
    token = 2 * 2 * 30 * 4
    short, long = (written(Desk(lex, tokenizer), "blockwise", Sampling(), tokens) for tokens in (1, 200))
    assert short.cache_bytes == long.cache_bytes == 14 * token
    first, last = (written(Desk(lex, tokenizer), "full", Sampling(), tokens) for tokens in (1, 200))
    assert last.cache_bytes - first.cache_bytes >= 100 * token
    assert last.history[-1] == (len(TEXT) + 199, last.cache_bytes)
    assert [tokens for tokens, _ in last.history] == sorted({tokens for tokens, _ in last.history})


def test_progress(lex: PreTrainedModel, tokenizer: Any) -> None:
    states = list(islice(Desk(lex, tokenizer).write(TEXT, "blockwise", Sampling()), 20))
    assert states[0].read < states[0].total == len(TEXT)
    assert (states[0].tokens, states[0].text, states[0].tokens_per_second) == (0, "", None)
    read = [state.read for state in states]
    assert read == sorted(read)
    assert read[-1] == len(TEXT)
    assert states[-1].tokens == sum(state.tokens > 0 for state in states) > 10


def test_a_long_text_is_shown_by_its_end(
    lex: PreTrainedModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(Desk(lex, tokenizer), "blockwise", Sampling(), 300)
    monkeypatch.setattr(writing, "KEPT_CHARACTERS", 40)
    monkeypatch.setattr(writing, "_HISTORY", 16)
    found = written(Desk(lex, tokenizer), "blockwise", Sampling(), 300)
    assert 40 <= len(found.text) <= 80 < len(expected.text)
    assert expected.text.endswith(found.text)
    assert len(found.history) <= 17 < len(expected.history) <= 129
    assert (found.history[0], found.history[-1]) == (expected.history[0], expected.history[-1])
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(found.history[2:-1])]
    assert max(gaps) <= 4 * min(gaps)  # it is drawn along the whole text


def test_it_ends_with_a_problem_only(lex: PreTrainedModel, tokenizer: Any) -> None:
    ids = torch.tensor([list(TEXT.encode())])
    states = write(Settings(lex).open("full"), tokenizer, ids, Sampling(), Turns(), most_cache_bytes=100_000)
    *_, before, end = states
    assert (before.problem, before.cache_bytes <= 100_000 < end.cache_bytes) == (None, True)
    assert end.problem is not None
    assert "this page stops at" in end.problem
    learned = tiny_model(**BYTES, position_embedding_type="learned", training_length=100)
    *_, end = Desk(learned, tokenizer).write(TEXT, "full", Sampling())
    assert end.problem is not None
    assert end.tokens == 100 - len(TEXT) + 1
    broken = tiny_model(**BYTES)
    with torch.no_grad():
        broken.model.norm.bias.fill_(float("nan"))
    [end] = Desk(broken, tokenizer).write(TEXT, "full", Sampling())
    assert end.problem == "The model's logits are not finite: check the weights, or load it with --dtype float32."


def test_wrong_input_is_refused_at_once(lex: PreTrainedModel, tokenizer: Any) -> None:
    desk = Desk(lex, tokenizer, most_characters=100)
    with pytest.raises(ValueError, match="There is no text"):
        desk.write("", "full", Sampling())
    with pytest.raises(ValueError, match="this page takes 100"):
        desk.write(TEXT * 2, "full", Sampling())
    with pytest.raises(ValueError, match="setting = 'none'"):
        desk.write(TEXT, "none", Sampling())
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"temperature = .*: it must be a number of at least 0"):
            Sampling(temperature)
    for top_p in (0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"top_p = .*: it must be more than 0 and at most 1"):
            Sampling(0.5, top_p)

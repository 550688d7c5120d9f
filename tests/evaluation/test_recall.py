"""Recall: a model that copies, one that knows nothing, caches, distances, and the texts themselves."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.models import random_ids, tiny_model
from helpers.rope_models import rope_model
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from lex_hf import TextRecall, TokenRecall, blockwise, measure_recall
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation import answers
from lex_hf.evaluation.hidden_pairs import draw_facts, write_context
from lex_hf.evaluation.recall import RecallOptions, Texts
from lex_hf.evaluation.statistics import wilson_interval

IDS = TokenRecall(keys=range(40, 60), values=range(60, 80), filler=range(2, 40), start=(1,))
QUIET: dict[str, Any] = {"progress": False, "num_samples": 60}


class Copier(PreTrainedModel):
    """One attention head that looks for the token after the last occurrence of the newest one, within a window."""

    config_class = PreTrainedConfig

    def __init__(self, window: int = 10**6) -> None:
        super().__init__(PreTrainedConfig(vocab_size=80, num_hidden_layers=1))
        self.embedding, self.window = nn.Embedding(80, 1), window

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
        cache = DynamicCache() if past_key_values is None else past_key_values
        current = F.one_hot(input_ids, 80).float()[:, None]
        read = cache.get_seq_length()
        last = cache.layers[0].values[:, :, -1:] if read else torch.zeros_like(current[:, :, :1])
        keys, values = cache.update(torch.cat((last, current[:, :, :-1]), dim=2), current, 0)
        places = torch.arange(keys.shape[2])
        age = places[read:, None] - places
        scores = (50 * current @ keys.mT).masked_fill((age < 0) | (age >= self.window), -torch.inf)
        logits = 20 * (scores.softmax(dim=-1) @ values)[:, 0]
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache if use_cache else None)


def test_a_model_that_copies_recalls_all_at_every_distance() -> None:
    result = measure_recall(Copier(), IDS, distances=[1, 3, 30, 500], **QUIET)
    for point in result.points:
        assert (point.accuracy, point.exact_match, point.problem) == (1, 1, None)
        assert point.accuracy_interval == wilson_interval(60, 60)
        assert point.margin > 10
    assert [point.distance for point in result.points] == [1, 3, 30, 500]
    assert [point.length for point in result.points] == [1 + 2 * 4 + each for each in (1, 3, 30, 500)]


def test_its_window_is_found_to_the_token() -> None:
    """A query that sees its own token and 19 before still finds a value 19 tokens before the question."""
    options = {"num_pairs": 1, "num_samples": 200, "progress": False}
    result = measure_recall(Copier(window=20), IDS, distances=[19, 20, 100], **options)
    within, *beyond = result.points
    assert (within.accuracy, within.exact_match) == (1, 1)
    for point in beyond:
        low, high = point.accuracy_interval
        assert low <= result.chance <= high
        assert point.exact_match < 0.2


def test_a_model_that_knows_nothing_is_at_chance() -> None:
    task = TokenRecall(keys=range(40, 60), values=range(60, 97), filler=range(2, 40), value_length=2)
    result = measure_recall(tiny_model(), task, num_candidates=5, num_samples=200, progress=False)
    assert (result.chance, result.training_length) == (0.2, 14)
    assert [point.distance for point in result.points] == [7, 14, 28, 56, 112]
    for point in result.points:
        low, high = point.accuracy_interval
        assert low <= 0.2 <= high
        assert point.exact_match < 0.05


def test_a_model_without_any_preference_is_at_chance() -> None:
    """Values that are equally probable: the first would always be right if that asked for came first."""
    model = tiny_model()
    nn.init.zeros_(model.lm_head.weight)
    [point] = measure_recall(model, IDS, distances=[9], num_samples=200, progress=False).points
    low, high = point.accuracy_interval
    assert low <= 1 / 8 <= high
    assert point.margin == 0


READERS = {
    "blockwise": lambda: tiny_model(),
    "sliding": lambda: tiny_model(attention_pattern="sliding"),
    "full": lambda: tiny_model(attention_pattern="full"),
    "hybrid": lambda: tiny_model(attention_pattern=["blockwise", "full"]),
    "llama": rope_model,
    "blockwise llama": lambda: blockwise(rope_model()),
    "llama with sinks": lambda: blockwise(rope_model(), sinks=1),
    "hybrid llama": lambda: blockwise(rope_model(), layers=[0, 2]),
    "gpt2": lambda: rope_model("gpt2", max_position_embeddings=64),
}


@pytest.mark.parametrize("name", READERS)
def test_scores_with_a_cache_are_those_of_whole_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_PIECE", 9)
    model, texts = READERS[name](), random_ids(3, 41, vocab_size=61)
    candidates = [
        [tuple(random_ids(size, seed=10 * row + size, vocab_size=61).tolist()) for size in (4, 1, 3)]
        for row in range(3)
    ]
    candidates[0][1] = (int(model(texts).logits[0, -1].argmax()),)
    with torch.no_grad():
        cached = answers.answer(model, texts, candidates, answers.own_cache)
        whole = answers.answer(model, texts, candidates, None)
        for row, column in np.ndindex(3, 3):
            ids = torch.tensor([[*texts[row].tolist(), *candidates[row][column]]])
            size = len(candidates[row][column])
            logits = model(ids, use_cache=False).logits[0, -size - 1 : -1]
            alone = logits.log_softmax(dim=-1).gather(1, ids[0, -size:, None]).sum()
            torch.testing.assert_close(whole.log_probabilities[row, column], alone, rtol=1e-4, atol=1e-4)
            assert whole.is_written[row, column] == bool((logits.argmax(dim=-1) == ids[0, -size:]).all())
    torch.testing.assert_close(cached.log_probabilities, whole.log_probabilities, rtol=1e-4, atol=1e-4)
    assert torch.equal(cached.is_written, whole.is_written)
    assert whole.is_written[0, 1]


def test_written_values_are_those_of_generate() -> None:
    model, texts = tiny_model(), random_ids(2, 33)
    written = model.generate(texts, max_new_tokens=5, do_sample=False)[:, 33:]
    others = written.clone()
    others[:, 3] = (others[:, 3] + 1) % 97
    candidates = [[tuple(row.tolist()) for row in pair] for pair in zip(others, written, strict=True)]
    found = answers.answer(model, texts, candidates, answers.own_cache).is_written
    assert found.tolist() == [[False, True], [False, True]]


def test_memory_of_blocks_is_bounded_while_texts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_PIECE", 28)
    model, sizes = tiny_model(), []
    model.register_forward_hook(
        lambda module, args, output: sizes.append(getattr(output.past_key_values, "nbytes", int)())
    )
    measure_recall(model, IDS, distances=[500], num_samples=2, batch_size=2, progress=False)
    assert len(set(sizes[1:])) == 1
    assert len(sizes) == 1 + -(-509 // 28)


# Distances and texts


words = byte_tokenizer()
sentences = TextRecall(words)
corpus = TextRecall(
    words, ["It rained. The road was wet, and long! " * 40, "A second text? " * 30], "In {key} live {value} people!"
)
table = TextRecall(words, ["17 4 18 5 " * 90], add_start_token=False)  # without sentences
marked = TokenRecall(
    keys=range(10, 14), values=range(20, 30), filler=range(5), marker=(30, 31), key_length=2, value_length=3
)
natural = TokenRecall(range(9), range(9), torch.randint(9, (600,)).tolist(), key_length=5, is_text=True)


@hypothesis_settings(max_examples=40)
@given(
    task=st.sampled_from([IDS, marked, natural, sentences, corpus, table]),
    distance=st.integers(0, 150),
    pairs=st.integers(1, 5),
    more=st.integers(0, 20),
    seed=st.integers(0, 10**6),
)
def test_the_pair_stands_exactly_at_its_distance(task: Any, distance: int, pairs: int, more: int, seed: int) -> None:
    facts = draw_facts(task, pairs, 6, np.random.default_rng(seed))
    distance += facts.least_distance
    before = facts.tokens_before + more
    text = write_context(task, facts, distance, before, np.random.default_rng(seed)).tolist()
    assert len(text) == len(task.start) + before + distance
    assert tuple(text[: len(task.start)]) == task.start
    asked = facts.asked
    assert tuple(text[-len(asked.question) :]) == asked.question
    end = len(text) - 1 - distance  # the last token of the value
    begin = end + 1 - len(asked.value) - len(asked.question)
    assert tuple(text[begin : begin + len(asked.statement)]) == asked.statement
    for pair in facts.others:
        assert places(text, pair.statement)
        assert len(places(text, pair.question)) == 1
    assert places(text, asked.question) == [begin, len(text) - len(asked.question)]
    assert len(set(facts.candidates)) == 6
    assert {pair.value for pair in (asked, *facts.others)} <= set(facts.candidates)
    assert facts.candidates[facts.answer] == asked.value


def places(text: list[int], part: tuple[int, ...]) -> list[int]:
    return [start for start in range(len(text)) if tuple(text[start : start + len(part)]) == part]


def test_other_pairs_stand_before_and_after_and_answers_are_anywhere() -> None:
    texts = Texts(IDS, RecallOptions(distances=[50], num_samples=60), None)
    after = set()
    for index, facts in enumerate(texts.facts[50]):
        text = texts.write(index, 50).tolist()
        value = len(text) - 51
        after.add(sum(places(text, pair.statement)[0] > value for pair in facts.others))
    assert after == {0, 1, 2, 3}
    assert {facts.answer for facts in texts.facts[50]} == set(range(8))


def test_texts_read_as_they_should() -> None:
    texts = Texts(corpus, RecallOptions(distances=[150], num_samples=20, num_pairs=2), None)
    for index, facts in enumerate(texts.facts[150]):
        text = words.decode(texts.write(index, 150))
        question = words.decode(facts.asked.question)
        assert text.startswith("<|endoftext|>")
        assert question.startswith("\nIn ")
        assert question.endswith(" live")
        value = words.decode(facts.asked.value)
        assert value[0] == " "
        assert 1000 <= int(value) <= 9999
        before, _, after = text.partition(f"{question}{value} people!\n")
        assert after.endswith(question)
        assert before.rstrip(" ")[-1] in ".!?\n"
        assert after.startswith((" ", "\n", "It", "A "))


def test_a_seed_gives_the_same_texts_and_another_others() -> None:
    one, same, other = (
        Texts(sentences, RecallOptions([90, more], 3, seed=seed), None) for seed, more in ((5, 95), (5, 300), (6, 95))
    )
    for index in range(3):
        assert torch.equal(one.write(index, 90), same.write(index, 90))
        assert one.facts[90][index] == same.facts[90][index] != other.facts[90][index]
        assert one.facts[90][index] != one.facts[95][index]
    results = [
        measure_recall(tiny_model(), IDS, distances=[20, 9, 20], num_samples=9, batch_size=size, progress=False)
        for size in (2, None)
    ]
    for first, second in zip(*(result.points for result in results), strict=True):
        assert (first.distance, first.accuracy, first.exact_match) == (
            second.distance,
            second.accuracy,
            second.exact_match,
        )
        assert first.margin == pytest.approx(second.margin, abs=1e-4)
    assert len(results[0].points) == 2


# Results and errors


def test_models_whose_positions_end_say_so_and_the_rest_is_measured() -> None:
    for model, said in (
        (tiny_model(position_embedding_type="learned", training_length=40), "40"),
        (rope_model("gpt2", max_position_embeddings=40), "index out of range"),
    ):
        near, far = measure_recall(
            model, IDS if model.config.vocab_size > 90 else small, distances=[20, 60], **QUIET
        ).points
        assert near.problem is None
        assert near.accuracy is not None
        assert said in str(far.problem)
        assert (far.accuracy, far.accuracy_interval, far.exact_match, far.margin) == (None,) * 4


small = TokenRecall(keys=range(20, 40), values=range(40, 60), filler=range(2, 20))


def test_logits_that_are_not_finite_are_a_problem() -> None:
    model = tiny_model()
    nn.init.constant_(model.lm_head.weight, torch.nan)
    [point] = measure_recall(model, IDS, distances=[9], **QUIET).points
    assert "not finite" in str(point.problem)


def test_a_result_is_json_and_a_picture() -> None:
    model = tiny_model(position_embedding_type="learned", training_length=40)
    result = measure_recall(model, IDS, distances=[20, 60], name="mine", **QUIET)
    numbers = json.loads(json.dumps(result.to_dict()))
    assert (numbers["model"], numbers["chance"], numbers["training_length"]) == ("mine", 0.125, 40)
    assert [point["distance"] for point in numbers["points"]] == [20, 60]
    left, right = result.plot().axes
    [line] = [each for each in left.get_lines() if each.get_label().startswith("mine")]
    assert line.get_label() == "mine (not at 60)"
    assert line.get_xdata().tolist() == [20]
    labels = [each.get_label() for each in left.get_lines()]
    assert {"chance, 0.125", "training length, 40 tokens"} <= set(labels)
    assert all("chance" not in each.get_label() for each in right.get_lines())


def test_training_mode_and_weights_are_left_as_they_were() -> None:
    model = tiny_model().train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    measure_recall(model, words_in_range, distances=[9], **QUIET)
    assert model.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


words_in_range = TokenRecall(keys=[3, 5, 7, 9, 11], values=range(20, 30), filler=[2, 4])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_samples": 0}, "num_samples = 0: it must be a whole number of at least 1"),
        ({"num_pairs": 0}, "num_pairs = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"num_candidates": 3}, "the values of all 4 pairs are among the candidates"),
        ({"num_candidates": True}, "num_candidates = True"),
        ({"distances": []}, "distances is empty"),
        ({"distances": [5, 0]}, "distance = 0: it must be a number of tokens, at least 1"),
        ({"distances": [2.5]}, "distance = 2.5"),
        ({"num_pairs": 21, "num_candidates": 21}, "keys: there are 20 different ones, and a sample needs 21|values"),
        ({"num_candidates": 21}, "values: there are 20 different ones, and a sample needs 21"),
    ],
)
def test_bad_options_are_refused_before_the_work(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        measure_recall(tiny_model(), IDS, **{"distances": [9], **options})


def test_bad_tasks_are_refused_before_the_work() -> None:
    model = tiny_model(vocab_size=257)
    with pytest.raises(ValueError, match=r"distance = 20: .* have 24 tokens, which is the least"):
        measure_recall(model, words, distances=[20])
    with pytest.raises(ValueError, match="the largest distance needs 700: give more text"):
        measure_recall(
            model, TokenRecall(range(9), range(9), natural.filler, key_length=5, is_text=True), distances=[676]
        )
    with pytest.raises(ValueError, match="can hold the token id 79, but the model's vocabulary has 70 ids"):
        measure_recall(tiny_model(vocab_size=70), IDS, distances=[9])
    with pytest.raises(ValueError, match="can hold the token id 88, but"):
        measure_recall(
            tiny_model(vocab_size=80), TokenRecall([1], [2, 3], [4, 88]), distances=[9], num_pairs=1, num_candidates=2
        )
    with pytest.raises(ValueError, match="keys and filler share the id 7"):
        TokenRecall(keys=range(5, 8), values=[1], filler=[7, 8])
    with pytest.raises(ValueError, match=r"keys = \[\]: give token ids"):
        TokenRecall(keys=[], values=[1], filler=[7])
    with pytest.raises(ValueError, match="key_length = 0"):
        TokenRecall(keys=[2], values=[1], filler=[7], key_length=0)
    for sentence in (
        "{key} is",
        "{value} is {key}",
        "{key}{value}",
        "{key} is {value} and {value}",
        "is {key} {key} {value}",
    ):
        with pytest.raises(ValueError, match=r"it must have \{key\} once"):
            TextRecall(words, sentence=sentence)
    for texts in ("one text", [], [b"bytes"]):
        with pytest.raises(ValueError, match="must be a list of strings"):
            TextRecall(words, texts)
    with pytest.raises(ValueError, match="the texts are empty"):
        TextRecall(words, ["", ""])
    with pytest.raises(ValueError, match="does not say its training length: give the distances"):
        measure_recall(Copier(), IDS)
    with pytest.raises(ValueError, match="Each of 20 passages of filler holds one of the questions"):
        measure_recall(
            model,
            TokenRecall(range(2), range(2), [0, 1] * 99, is_text=True),
            distances=[9],
            num_pairs=2,
            num_candidates=2,
        )


def test_intervals_are_those_of_wilson() -> None:
    """(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), with z = 1.96."""
    p, n, z = 0.3, 40, 1.959964
    middle, half = p + z**2 / 2 / n, z * (p * (1 - p) / n + z**2 / 4 / n**2) ** 0.5
    assert wilson_interval(12, 40) == pytest.approx(
        ((middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n))
    )
    assert wilson_interval(0, 5)[0] == 0

"""Perplexity: hand computations, a token-by-token reference, agreement of protocols, and the metric."""

import json
import math
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from torch import Tensor, nn
from transformers import DynamicCache, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import lex_hf
from lex_hf.perplexity import (
    PROTOCOLS,
    ContextBucket,
    PerplexityResult,
    chunked,
    compute_perplexity,
    load_for_evaluation,
    streaming,
)
from lex_hf.tokenization import byte_tokenizer

VOCABULARY = 257
TOKENIZER = byte_tokenizer()
BOS = 256


class BigramConfig(PreTrainedConfig):  # type: ignore[misc]
    model_type = "test_bigram"
    vocab_size = VOCABULARY


class Bigram(PreTrainedModel):  # type: ignore[misc]
    """The logits of the next token are the row of a table that belongs to the token before; first all zero.

    It notes the shape of every batch it sees, what was asked for, and whether it ran as an evaluation.
    """

    config_class = BigramConfig

    def __init__(self, cached: bool = True) -> None:
        super().__init__(BigramConfig())
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)
        self.dropout = nn.Dropout(0.5)
        self.cached = cached
        self.shapes: list[tuple[int, int]] = []
        self.cache_asked_for: set[bool] = set()
        self.as_evaluation = True
        self.post_init()
        nn.init.zeros_(self.table.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(
        self, input_ids: Tensor, past_key_values: Any = None, use_cache: bool = False
    ) -> CausalLMOutputWithPast:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        self.cache_asked_for.add(use_cache)
        self.as_evaluation &= not self.training and not torch.is_grad_enabled()
        kept = DynamicCache() if use_cache and self.cached else None
        return CausalLMOutputWithPast(logits=self.dropout(self.table(input_ids)), past_key_values=kept)

    def set_probability(self, before: int | str, after: int | str, probability: float) -> None:
        """Make `after` this probable after `before`; all other tokens are equally probable."""
        row = torch.full((VOCABULARY,), math.log((1 - probability) / (VOCABULARY - 1)))
        row[_id(after)] = math.log(probability)
        self.table.weight.data[_id(before)] = row


def _id(token: int | str) -> int:
    return ord(token) if isinstance(token, str) else token


@cache
def neox() -> GPTNeoXForCausalLM:
    """A model of another family, with full attention and positions."""
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=20,
            bos_token_id=BOS,
            eos_token_id=BOS,
        )
    )
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model.eval()


@cache
def lex(pattern: str) -> lex_hf.LexForCausalLM:
    return tiny_model(vocab_size=VOCABULARY, attention_pattern=pattern, bos_token_id=BOS)


def text_of(length: int, seed: int = 0) -> str:
    """Random letters, `length` of them: as many tokens, or one more with the start token."""
    letters = torch.randint(97, 123, (length,), generator=torch.Generator().manual_seed(seed))
    return "".join(map(chr, letters.tolist()))


def compute(model: Any, texts: list[str], **options: Any) -> PerplexityResult:
    return compute_perplexity(model, TOKENIZER, texts, **{"progress": False, **options})


@torch.no_grad()
def reference(model: Any, text: str, length: int | None) -> list[float]:
    """NLL of every token after the start token, one forward pass each.

    The model sees what lies before the token in its segment of `length` inputs, or all of it if `None`.
    """
    tokens = torch.tensor([BOS, *text.encode()])
    losses = []
    for target in range(1, len(tokens)):
        start = 0 if length is None else (target - 1) // length * length
        logits = model(input_ids=tokens[None, start:target], use_cache=False).logits[0, -1]
        losses.append(-logits.double().log_softmax(-1)[tokens[target]].item())
    return losses


def nll_of(model: Any, text: str, protocol: str, length: int, batch_size: int = 3) -> list[float]:
    """Per-token losses of one text, put in order."""
    tokens = torch.tensor([BOS, *text.encode()])
    with torch.no_grad():
        scores = list(PROTOCOLS[protocol](model, [tokens], length, batch_size))
    losses = {each.target + offset: nll for each in scores for offset, nll in enumerate(each.nll.tolist())}
    assert sum(len(each.nll) for each in scores) == len(losses), "a token was scored twice"
    assert sorted(losses) == list(range(1, len(tokens))), "a token was not scored"
    return [losses[target] for target in sorted(losses)]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_known_probabilities_by_hand(protocol: str) -> None:
    model = Bigram()
    model.set_probability(BOS, "a", 1 / 4)
    model.set_probability("a", "b", 1 / 8)
    model.set_probability("b", "b", 1 / 2)

    result = compute(model, ["ab", "abbb"], protocol=protocol, length=3)

    # 1/4 · 1/8 over two tokens, and 1/4 · 1/8 · 1/2 · 1/2 over four.
    assert result.perplexities == pytest.approx([32 ** (1 / 2), 128 ** (1 / 4)], rel=1e-6)
    assert result.mean_perplexity == pytest.approx((32 ** (1 / 2) + 128 ** (1 / 4)) / 2, rel=1e-6)
    assert result.perplexity == pytest.approx((32 * 128) ** (1 / 6), rel=1e-6)
    assert result.nll == pytest.approx(math.log(32 * 128) / 6, rel=1e-6)
    assert result.tokens == 6
    assert result.bits_per_byte == pytest.approx(12 / 6, rel=1e-6)
    assert (result.protocol, result.length) == (protocol, 3)


def test_bits_per_byte_counts_bytes_of_utf8() -> None:
    text = "né€😀"  # 1 + 2 + 3 + 4 bytes, and as many tokens
    with_start = compute(Bigram(), [text])
    without = compute(Bigram(), [text], add_start_token=False)
    assert (with_start.tokens, without.tokens) == (10, 9)
    assert with_start.bits_per_byte == pytest.approx(math.log2(VOCABULARY), rel=1e-6)
    assert without.bits_per_byte == pytest.approx(0.9 * math.log2(VOCABULARY), rel=1e-6)


def test_loss_by_position_by_hand() -> None:
    model = Bigram()
    for index, letter in enumerate("abcdef"):
        model.set_probability("fabcde"[index], letter, 2.0 ** -(index + 1))
    model.set_probability(BOS, "a", 2.0**-1)
    bit = math.log(2)  # the losses of "abcdef" are 1, 2, 3, 4, 5, 6 bits

    streamed = compute(model, ["abcdef"], protocol="streaming", length=4).loss_by_position
    assert [(each.start, each.stop, each.tokens) for each in streamed] == [(1, 2, 1), (2, 4, 2), (4, 8, 3)]
    assert [each.nll / bit for each in streamed] == pytest.approx([1, 2.5, 5], rel=1e-5)

    segments = compute(model, ["abcdef"], protocol="chunked", length=4).loss_by_position
    assert [(each.start, each.stop, each.tokens) for each in segments] == [(1, 2, 2), (2, 4, 3), (4, 8, 1)]
    # Contexts 1 2 3 4 1 2: "e" and "f" are in the second segment.
    assert [each.nll / bit for each in segments] == pytest.approx([3, 11 / 3, 4], rel=1e-5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_losses_are_float32_whatever_the_dtype(protocol: str) -> None:
    model = Bigram().to(torch.bfloat16).eval()
    model.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    got = nll_of(model, text_of(20), protocol, length=6)
    model.float()  # the same rounded table: only the loss itself could differ
    assert got == pytest.approx(reference(model, text_of(20), None), abs=1e-5)


def test_max_length_reads_only_the_beginning() -> None:
    whole, cut = text_of(40), text_of(40)[:12]
    assert compute(neox(), [whole], max_length=13, length=5) == compute(neox(), [cut], length=5)
    assert compute(neox(), [whole], max_length=12, length=5, add_start_token=False) == compute(
        neox(), [cut], length=5, add_start_token=False
    )
    assert compute(neox(), [cut], max_length=99) == compute(neox(), [cut])


def test_default_length_is_the_training_length() -> None:
    assert compute(lex("blockwise"), ["abc"]).length == 14
    assert compute(neox(), ["abc"]).length == 1024


# --- protocols ------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(size=st.integers(1, 40), length=st.integers(1, 45), batch_size=st.integers(1, 4))
def test_chunked_is_the_token_by_token_reference(size: int, length: int, batch_size: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "chunked", length, batch_size)
    assert got == pytest.approx(reference(neox(), text, length), abs=1e-4)


@settings(max_examples=8)
@given(size=st.integers(1, 40), length=st.integers(1, 45))
def test_streaming_is_the_token_by_token_reference(size: int, length: int) -> None:
    text = text_of(size, seed=size)
    got = nll_of(neox(), text, "streaming", length)
    assert got == pytest.approx(reference(neox(), text, None), abs=1e-4)


@pytest.mark.parametrize("pattern", ["blockwise", "sliding", "full"])
@settings(max_examples=10)
@given(size=st.integers(1, 120), length=st.integers(1, 125))
def test_streaming_lex_is_one_pass_over_the_document(pattern: str, size: int, length: int) -> None:
    text = text_of(size, seed=size)
    tokens = torch.tensor([[BOS, *text.encode()]])
    with torch.no_grad():
        logits = lex(pattern)(input_ids=tokens[:, :-1], use_cache=False).logits[0]
    whole = F.cross_entropy(logits, tokens[0, 1:], reduction="none").tolist()
    assert nll_of(lex(pattern), text, "streaming", length) == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize("model", [neox, lambda: lex("full")])
def test_protocols_agree_on_a_document_that_fits(model: Any) -> None:
    texts = [text_of(30), text_of(17, seed=1)]
    one = compute(model(), texts, protocol="chunked", length=31)
    other = compute(model(), texts, protocol="streaming", length=7)
    assert one.perplexities == pytest.approx(other.perplexities, rel=1e-5)
    assert one.perplexity == pytest.approx(other.perplexity, rel=1e-5)


def test_context_helps_where_the_protocol_gives_it() -> None:
    """Streaming must not forget between chunks: `chunked` at the same length does, and differs."""
    text = text_of(40)
    streamed, cut = (nll_of(neox(), text, protocol, length=5) for protocol in ("streaming", "chunked"))
    assert streamed[:5] == pytest.approx(cut[:5], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(streamed[5:], cut[5:], strict=True)) > 1e-2


def test_batch_size_does_not_matter() -> None:
    texts = [text_of(size, seed=size) for size in (23, 1, 50, 23, 8)]
    one, many = (compute(neox(), texts, length=5, batch_size=size) for size in (1, 7))
    assert one.perplexities == pytest.approx(many.perplexities, rel=1e-5)
    assert one.perplexity == pytest.approx(many.perplexity, rel=1e-5)
    assert one.perplexities == pytest.approx(
        [compute(neox(), [text], length=5).perplexity for text in texts], rel=1e-5
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_length_scores_the_same_tokens(protocol: str) -> None:
    texts = [text_of(23), text_of(9, seed=1)]
    model = Bigram()
    model.table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    # A bigram model does not care about context, so equal targets mean equal losses.
    results = [compute(model, texts, protocol=protocol, length=length) for length in (1, 2, 5, 23, 24, 99)]
    assert {result.tokens for result in results} == {32}
    for result in results:
        assert result.nll == pytest.approx(results[0].nll, rel=1e-6)
        assert sum(bucket.tokens for bucket in result.loss_by_position) == 32


def test_chunked_never_pads_and_batches_equal_segments() -> None:
    model = Bigram()
    compute(model, [text_of(10), text_of(14), text_of(6)], length=4, batch_size=4)
    # Segments 4 4 2, 4 4 4 2 and 4 2: six of four tokens, three of two.
    assert model.shapes == [(4, 4), (2, 4), (3, 2)]
    assert model.cache_asked_for == {False}


def test_streaming_reads_one_chunk_at_a_time() -> None:
    model = Bigram()
    compute(model, [text_of(10), text_of(3)], protocol="streaming", length=4, batch_size=9)
    assert model.shapes == [(1, 4), (1, 4), (1, 2), (1, 3)]
    assert model.cache_asked_for == {True}


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_model_is_evaluated_and_left_as_it_was(protocol: str) -> None:
    model = Bigram().train()
    model.table.eval()
    compute(model, ["abc"], protocol=protocol)
    assert model.as_evaluation
    assert [module.training for module in (model, model.table, model.dropout)] == [True, False, True]

    model.table.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="is nan"):
        compute(model, ["abc"], protocol=protocol)
    assert [module.training for module in (model, model.table, model.dropout)] == [True, False, True]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    compute(Bigram(), ["abc"], progress=False)
    assert capsys.readouterr().err == ""
    compute(Bigram(), ["abc", "abcd"], progress=True)
    assert "7.00/7.00" in capsys.readouterr().err


def test_result_is_ready_for_json() -> None:
    result = compute(neox(), [text_of(9)], length=4)
    loaded = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    buckets = [ContextBucket(**bucket) for bucket in loaded.pop("loss_by_position")]
    assert PerplexityResult(loss_by_position=buckets, **loaded) == result


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "There are no texts"),
        ("abc", {}, "a single string"),
        (["abc", 5], {}, r"Text 1 .* is a int"),
        (["abc", ""], {}, r"Text 1 .*, '', gives the tokens \[256\]"),
        (["abc", "a"], {"add_start_token": False}, r"Text 1 .*, 'a', gives the tokens \[97\]"),
        (["abc"], {"protocol": "strided"}, "protocol = 'strided': it must be one of chunked, streaming"),
        (["abc"], {"length": 0}, "length = 0: it must be at least 1"),
        (["abc"], {"batch_size": 0}, "batch_size = 0: it must be at least 1"),
        (["abc"], {"max_length": 1}, "max_length = 1: it must be at least 2"),
    ],
)
def test_bad_input(texts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute(Bigram(), texts, **options)


def test_tokenizer_without_bos() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    with pytest.raises(ValueError, match="no BOS token"):
        compute_perplexity(Bigram(), tokenizer, ["abc"], progress=False)
    assert compute_perplexity(Bigram(), tokenizer, ["abc"], add_start_token=False, progress=False).tokens == 2


def test_special_tokens_are_not_added() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{tokenizer.bos_token} $A {tokenizer.eos_token}", special_tokens=[(tokenizer.bos_token, BOS)]
    )
    assert tokenizer("a")["input_ids"] == [BOS, 97, BOS]
    options: dict[str, Any] = {"length": 4, "progress": False}
    for add_start_token in (True, False):
        options["add_start_token"] = add_start_token
        assert compute_perplexity(neox(), tokenizer, ["abcdef"], **options) == compute(neox(), ["abcdef"], **options)


def test_tokenizer_of_another_model() -> None:
    model = tiny_model(vocab_size=100)
    with pytest.raises(ValueError, match=r"Text 1 .* holds the token id 120, .* has 100 ids"):
        compute(model, ["abc", "axb"], add_start_token=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_loss_that_is_not_finite(protocol: str, value: float) -> None:
    model = Bigram()
    model.table.weight.data[ord("x"), ord("y")] = value
    with pytest.raises(ValueError, match=r"token 6 of text 1 .* is (nan|inf)"):
        compute(model, ["abc", "abcdxyz"], protocol=protocol, length=2)


def test_streaming_needs_a_cache() -> None:
    with pytest.raises(ValueError, match="Bigram returns no past_key_values"):
        compute(Bigram(cached=False), ["abc"], protocol="streaming")


# --- loading and the metric -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved LEX model with its tokenizer."""
    path = str(tmp_path_factory.mktemp("model"))
    lex("blockwise").save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


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


def test_load_for_evaluation(folder: str) -> None:
    model, tokenizer = load_for_evaluation(folder, dtype="bfloat16", attention_pattern="full")
    assert (model.dtype, model.device.type, model.training) == (torch.bfloat16, "cpu", False)
    assert model.config.attention_pattern == "full"
    assert tokenizer("né")["input_ids"] == [110, 195, 169]
    assert load_for_evaluation(folder, device="cpu")[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpux"}, "device = 'gpux': it must be a device of torch"),
        ({"dtype": "float99"}, "dtype = 'float99': it must be a dtype of torch"),
        ({"dtype": "nn"}, "dtype = 'nn': it must be a dtype of torch"),
    ],
)
def test_bad_loading_options(folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_for_evaluation(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["gpu", "cuda"])
def test_no_gpu_here(folder: str, device: str) -> None:
    with pytest.raises(ValueError, match=f"device = '{device}': torch finds no CUDA device"):
        load_for_evaluation(folder, device=device)


def test_folder_that_lacks_something(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"searched for a tokenizer \(tokenizer.json"):
        load_for_evaluation(str(tmp_path))
    TOKENIZER.save_pretrained(tmp_path)
    lex("blockwise").config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"searched for a causal language model .*no file named"):
        load_for_evaluation(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="searched for a causal language model"):
        load_for_evaluation(str(tmp_path))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_metric_is_compute_perplexity(metric: Any, folder: str, protocol: str) -> None:
    texts = [text_of(50), text_of(31, seed=1) + "né€"]
    got = metric.compute(predictions=texts, model_id=folder, protocol=protocol, length=8, progress=False)
    assert got == compute(lex("blockwise"), texts, protocol=protocol, length=8).to_dict()
    assert got == metric.compute(
        predictions=texts,
        model=lex("blockwise"),
        tokenizer=TOKENIZER,
        protocol=protocol,
        length=8,
        progress=False,
    )


def test_metric_passes_every_option_on(metric: Any, folder: str) -> None:
    texts = [text_of(50)]
    options: dict[str, Any] = {"length": 20, "batch_size": 2, "add_start_token": False, "max_length": 45}
    got = metric.compute(
        predictions=texts,
        model_id=folder,
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
            "device, lenght: of use only with model_id",
        ),
    ],
)
def test_metric_with_wrong_arguments(metric: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=["abc"], **arguments)


def test_metric_describes_itself(metric: Any) -> None:
    assert "2212.10554" in metric.citation
    assert list(metric.features) == ["predictions"]
    for name in ("protocol", "length", "batch_size", "model_id", "max_length"):
        assert f"    {name} (" in metric.inputs_description


def test_protocols_are_named_after_their_functions() -> None:
    assert {"chunked": chunked, "streaming": streaming} == PROTOCOLS

"""The perplexity metric that `evaluate.load(lex_hf.metric_path())` opens."""

# `evaluate` copies this file into its cache, reads its imports line by line (`import a, b` would fail) and
# takes the first subclass of `evaluate.Metric` it finds among its names.
from dataclasses import fields
from typing import Any

import datasets
import evaluate

from lex_hf.evaluation.perplexity import PerplexityOptions, load_for_evaluation, measure_perplexity

_CITATION = """\
@inproceedings{sun2023length,
  title = {A Length-Extrapolatable Transformer},
  author = {Sun, Yutao and Dong, Li and Patra, Barun and Ma, Shuming and Huang, Shaohan and Benhaim, Alon and
            Chaudhary, Vishrav and Song, Xia and Wei, Furu},
  booktitle = {Proceedings of the 61st Annual Meeting of the Association for Computational Linguistics},
  year = {2023},
  eprint = {2212.10554},
  archivePrefix = {arXiv}
}
"""

_DESCRIPTION = """\
Perplexity of texts under a causal language model, at a chosen length: exp of the mean negative log-likelihood
per token. A named protocol defines what the model sees before each token it is scored on.
"""

_INPUTS = """
Args:
    predictions (list of str): The texts to score.
    model_id (str): Folder or Hub id of a causal language model with its tokenizer.
    model, tokenizer: The two already loaded, instead of `model_id`.
    protocol (str): "chunked" (segments of `length` tokens, each alone; the default), "sliding" (windows of `length`
        tokens that overlap), "streaming" (one pass over each text with the model's cache) or "last_token" (only the
        last token of each segment of `length` tokens, with several numbers of tokens before it).
    length (int): Tokens in a segment, window or chunk; by default the model's training length, 1024 if it has none.
    stride (int): Of "sliding": tokens between two windows; by default half of `length`.
    contexts (list of int): Of "last_token": numbers of tokens before the one scored; by default the powers of two
        below `length` - 1, and `length` - 1.
    batch_size (int or "auto"): Windows evaluated at once, 8 by default; "auto" takes as many as memory allows.
    add_start_token (bool): Whether to prepend the BOS token to each text, so that its first token is scored;
        True by default.
    max_length (int): Number of tokens read of each text, the start token included; by default all.
    records (str): A file of JSON lines where finished texts are recorded; what it holds is not computed again.
    device (str): "cpu", "cuda" or "gpu"; by default a GPU if there is one.
    dtype (str or torch.dtype): Dtype of the weights; by default that of the checkpoint.
    trust_remote_code (bool): Whether code that comes with the model may run; False by default.
    progress (bool): Whether to show a progress bar; True by default.
    **model_kwargs: Passed to `from_pretrained`, for example attention_pattern="full".
Returns:
    dict with
    perplexity: exp of the mean negative log-likelihood over all scored tokens.
    perplexities, mean_perplexity: perplexity of each text, and its mean over texts.
    nll: mean negative log-likelihood in nats per token.
    tokens: number of scored tokens.
    bits_per_byte: nll in bits, times the tokens per UTF-8 byte of the texts.
    confidence_interval, confidence_level, confidence_note: an interval for perplexity from a bootstrap over texts,
        its level, and its method or the reason why there is none.
    protocol, length, options: as used.
    loss_by_position: mean nll by number of tokens of context, in buckets between powers of two; for "last_token" at
        each of the contexts.
    documents: for each text its SHA-256, total nll, scored tokens and bytes.
Example:
    >>> perplexity = evaluate.load(lex_hf.metric_path())
    >>> perplexity.compute(predictions=texts, model_id="my-lex-model", length=2048)["perplexity"]
"""


class Perplexity(evaluate.Metric):
    """Perplexity under a named protocol; takes the official metric's arguments, returns its results, and more."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
            reference_urls=["https://arxiv.org/abs/2212.10554"],
        )

    def add(self, *, prediction: str | None = None, reference: Any = None, **kwargs: Any) -> None:
        """Add one text; datasets before 5.0 would write it after those that `add_batch` adds later."""
        given = {} if reference is None else {"references": [reference]}
        self.add_batch(predictions=None if prediction is None else [prediction], **given, **kwargs)

    def _compute(
        self,
        predictions: list[str],
        model_id: str | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        **arguments: Any,
    ) -> dict[str, Any]:
        names = {field.name for field in fields(PerplexityOptions)}
        options = PerplexityOptions(**{name: value for name, value in arguments.items() if name in names})
        loading = {name: value for name, value in arguments.items() if name not in names}
        model, tokenizer = _model_and_tokenizer(model_id, model, tokenizer, loading)
        return measure_perplexity(model, tokenizer, predictions, options).to_dict()


def _model_and_tokenizer(model_id: str | None, model: Any, tokenizer: Any, loading: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model, or take the one that is given; never both."""
    if model_id is not None and model is None and tokenizer is None:
        return load_for_evaluation(model_id, **loading)
    if model_id is not None or model is None or tokenizer is None:
        raise ValueError("Pass either model_id, or both model and tokenizer already loaded.")
    if loading:
        raise ValueError(f"{', '.join(loading)}: allowed only with model_id, but a model was passed that is loaded.")
    return model, tokenizer

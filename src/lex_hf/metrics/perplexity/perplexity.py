"""The perplexity metric that `evaluate.load(lex_hf.metric_path())` opens."""

# `evaluate` copies this file into its cache, reads its imports line by line (`import a, b` would fail) and
# takes the first subclass of `evaluate.Metric` it finds among its names.
from typing import Any

import datasets
import evaluate

from lex_hf.perplexity import compute_perplexity, load_for_evaluation

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
per token. A named protocol says what the model sees before each token it is scored on.
"""

_INPUTS = """
Args:
    predictions (list of str): The texts to score.
    model_id (str): Folder or Hub id of a causal language model with its tokenizer.
    model, tokenizer: The two already loaded, instead of `model_id`.
    protocol (str): "chunked" (segments of `length` tokens, each alone; the default) or "streaming" (one pass
        over each text with the model's cache).
    length (int): Tokens in a segment or chunk; by default the model's training length, 1024 if it has none.
    batch_size (int): Segments evaluated at once, 8 by default.
    add_start_token (bool): Whether the BOS token goes before each text, so that its first token is scored;
        True by default.
    max_length (int): Read only so many tokens of each text, the start token included.
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
    bits_per_byte: total negative log-likelihood in bits by the UTF-8 bytes of the texts.
    protocol, length: as used.
    loss_by_position: mean nll by number of tokens of context, in buckets between powers of two.
Example:
    >>> perplexity = evaluate.load(lex_hf.metric_path())
    >>> perplexity.compute(predictions=texts, model_id="my-lex-model", length=2048)["perplexity"]
"""


class Perplexity(evaluate.Metric):
    """Perplexity under a named protocol; the official metric's arguments and results, and more."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": datasets.Value("string")}),
            reference_urls=["https://arxiv.org/abs/2212.10554"],
        )

    def _compute(
        self,
        predictions: list[str],
        model_id: str | None = None,
        *,
        model: Any = None,
        tokenizer: Any = None,
        protocol: str = "chunked",
        length: int | None = None,
        batch_size: int = 8,
        add_start_token: bool = True,
        max_length: int | None = None,
        progress: bool = True,
        **loading: Any,
    ) -> dict[str, Any]:
        model, tokenizer = _model_and_tokenizer(model_id, model, tokenizer, loading)
        return compute_perplexity(
            model,
            tokenizer,
            predictions,
            protocol=protocol,
            length=length,
            batch_size=batch_size,
            add_start_token=add_start_token,
            max_length=max_length,
            progress=progress,
        ).to_dict()


def _model_and_tokenizer(model_id: str | None, model: Any, tokenizer: Any, loading: dict[str, Any]) -> tuple[Any, Any]:
    """Load the model, or take the one that is given; never both."""
    if model_id is not None and model is None and tokenizer is None:
        return load_for_evaluation(model_id, **loading)
    if model_id is not None or model is None or tokenizer is None:
        raise ValueError("Pass either model_id, or both model and tokenizer already loaded.")
    if loading:
        raise ValueError(f"{', '.join(loading)}: of use only with model_id; a model is loaded already.")
    return model, tokenizer

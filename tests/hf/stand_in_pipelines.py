"""Stand-in for the modules with the tests of single pipelines, which transformers' `PipelineTesterMixin` calls.

Each class makes the pipeline of one task, in `get_test_pipeline`, and checks what it answers, in `run_pipeline_test`:
that must have the right form, and be the same in a batch, where the shorter text is padded, as alone.
"""

from typing import Any, ClassVar

import torch
from transformers import Pipeline, PreTrainedModel, PreTrainedTokenizerBase, pipeline

TEXTS = ["A short text.", "Another one, which is a little longer than the first, and longer than a block."]
NEW_TOKENS = 8


class _TaskTests:
    task = ""
    options: ClassVar[dict[str, Any]] = {}

    def get_test_pipeline(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: str
    ) -> tuple[Pipeline, list[str]]:
        model = model.to(getattr(torch, dtype))
        return pipeline(self.task, model=model, tokenizer=tokenizer, **self.options), TEXTS

    def run_pipeline_test(self, answer: Pipeline, texts: list[str]) -> None:
        tolerance = 1e-5 if answer.model.dtype == torch.float32 else 1e-2
        for text, batched in zip(texts, answer(texts, batch_size=len(texts)), strict=True):
            alone = self.numbers(answer, text, answer([text])[0])
            torch.testing.assert_close(self.numbers(answer, text, batched), alone, atol=tolerance, rtol=tolerance)

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        """Check the form of an answer; return its numbers."""
        raise NotImplementedError


class FeatureExtractionPipelineTests(_TaskTests):
    task = "feature-extraction"

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        features = torch.tensor(given)[0]
        assert features.shape[1] == answer.model.config.hidden_size
        return features[-len(answer.tokenizer(text)["input_ids"]) :]  # without the padding, which is on the left


class TextClassificationPipelineTests(_TaskTests):
    task = "text-classification"
    options: ClassVar = {"top_k": None}

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        scores = {label["label"]: label["score"] for label in given}
        assert set(scores) == set(answer.model.config.label2id)
        return torch.tensor([scores[label] for label in sorted(scores)])


class TextGenerationPipelineTests(_TaskTests):
    task = "text-generation"
    options: ClassVar = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_tensors": True}

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        tokens, prompt = given[0]["generated_token_ids"], answer.tokenizer(text)["input_ids"]
        assert tokens[-NEW_TOKENS - len(prompt) : -NEW_TOKENS] == prompt
        return torch.tensor(tokens[-NEW_TOKENS:])


class TokenClassificationPipelineTests(_TaskTests):
    task = "token-classification"
    options: ClassVar = {"ignore_labels": []}

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        assert "".join(text[token["start"] : token["end"]] for token in given) == text
        return torch.tensor([float(token["score"]) for token in given])


class ZeroShotClassificationPipelineTests(_TaskTests):
    task = "zero-shot-classification"
    options: ClassVar = {"candidate_labels": ["letters", "numbers"]}

    def numbers(self, answer: Pipeline, text: str, given: Any) -> torch.Tensor:
        scores = dict(zip(given["labels"], given["scores"], strict=True))
        assert given["sequence"] == text
        assert set(scores) == set(self.options["candidate_labels"])
        return torch.tensor([scores[label] for label in sorted(scores)])

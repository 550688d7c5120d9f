"""transformers' own shared tests, run over the LEX classes: `make hf-tests`.

The package `tests` is what `fetch.py` unpacked. Inputs are longer than two blocks, and some rows are padded.
"""

import inspect
import re
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
from tests.test_fsdp_mixin import FSDPTesterMixin
from tests.test_memory_cleanup_mixin import MemoryCleanupMixin
from tests.test_modeling_common import ModelTesterMixin
from tests.test_pipeline_mixin import PipelineTesterMixin
from tests.test_tensor_parallel_mixin import TensorParallelTesterMixin
from tests.test_training_mixin import TrainingTesterMixin
from transformers import PreTrainedModel, set_seed
from transformers.models.auto import modeling_auto
from transformers.testing_utils import torch_device

from lex_hf import (
    LexConfig,
    LexForCausalLM,
    LexForQuestionAnswering,
    LexForSequenceClassification,
    LexForTokenClassification,
    LexModel,
)
from lex_hf.data.tokenizers import byte_tokenizer
from tests import test_executorch, test_fsdp_mixin, test_pipeline_mixin, test_tensor_parallel_mixin

# Tests that do not apply to LEX, by patterns of their names, and why. All other tests run, except where the machine
# lacks what they need: an accelerator, flash attention, the libraries deepspeed and kernels.
SKIPS = {
    r"test_.*(image|audio|video|vision|depth|speech|object|document|any_to_any|mask_generation).*": "LEX reads text.",
    r"test_pipeline_(fill_mask|table_question_answering)(_fp16)?": "LEX is causal, and reads no tables.",
    r"test_get_text_features_.*": "For models that embed text beside images.",
    r"test_(?!.*non_composite).*composite.*|test_internal_.*_subconfig_are_same": "LEX is not made of several models.",
    r"test_encoder_decoder_.*": "LEX has no encoder.",
    r"test_.*(moe|expert|router|batched_and_grouped).*": "LEX has no experts.",
    r"test_keep_in_fp32_modules.*": "No weight of LEX has to stay in float32: its positions are computed so.",
    r"test_reverse_loading_mapping|test_can_load_from_already_mapped_keys": "LEX saves weights under their own names.",
    r"test_model_rope_.*": "LEX does not scale its rotation for longer texts; blocks keep distances short.",
    r"test_resize_position_vector_embeddings": "The schemes tested have no table of positions.",
    r"test_sliding_window_mask": "LEX has no switch use_sliding_window; sliding is one of its attention patterns.",
    r"test_(static|hybrid)_cache_module_forward|test_decoder_only_lm_export": (
        "ExecuTorch's wrapper counts tokens in transformers' static cache; LEX reads from a cache of its own."
    ),
}

# These tables tell the tests what a class is for.
for table, model_class in {
    "MODEL": LexModel,
    "MODEL_FOR_CAUSAL_LM": LexForCausalLM,
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": LexForSequenceClassification,
    "MODEL_FOR_TOKEN_CLASSIFICATION": LexForTokenClassification,
    "MODEL_FOR_QUESTION_ANSWERING": LexForQuestionAnswering,
}.items():
    getattr(modeling_auto, f"{table}_MAPPING_NAMES")["lex"] = model_class.__name__

# To save time, these tests are for a few types of models only, unless told otherwise.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None

unused_skips = set(SKIPS)


def skipping(test_class: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """Skip the tests of a class that `SKIPS` names, for the reasons it gives."""
    for name in unittest.defaultTestLoader.getTestCaseNames(test_class):
        for pattern in SKIPS:
            if re.fullmatch(pattern, name):
                unused_skips.discard(pattern)
                setattr(test_class, name, unittest.skip(SKIPS[pattern])(lambda self: None))
    return test_class


def tiny_config(**fields: Any) -> LexConfig:
    """A configuration with small sizes and blocks of 4 tokens."""
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "training_length": 8,
        "xpos_scale_base": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LexConfig(**{**sizes, **fields})


class LexModelTester:
    """Makes the small models and inputs that the tests ask for."""

    base_model_class = LexModel
    causal_lm_class = LexForCausalLM
    is_training = True
    batch_size = 5
    seq_length = 13
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def get_config(self) -> LexConfig:
        return tiny_config(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[LexConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(1, config.vocab_size, (self.batch_size, self.seq_length), device=torch_device)
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids).tril(self.seq_length - 3)}


@skipping
class LexModelTest(
    MemoryCleanupMixin,
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    TensorParallelTesterMixin,
    FSDPTesterMixin,
    unittest.TestCase,
):
    """The default: xPos and blockwise attention."""

    fields: ClassVar[dict[str, Any]] = {}
    run_under_no_grad = False
    test_can_init_all_missing_weights_before_2023 = True
    _torch_compile_train_cls = LexForCausalLM
    all_model_classes = (
        LexModel,
        LexForCausalLM,
        LexForSequenceClassification,
        LexForTokenClassification,
        LexForQuestionAnswering,
    )

    def setUp(self) -> None:
        super().setUp()
        self.model_tester = LexModelTester(**self.fields)

    def skipTest(self, reason: str) -> None:  # noqa: N802 - unittest's name
        """On a CPU no test skips itself for a reason that `SKIPS` does not give."""
        if torch_device == "cpu":
            self.fail(f"skipped, and not among SKIPS: {reason}")
        super().skipTest(reason)

    def _skip_if_insufficient_devices(self, world_size: int) -> None:
        """On a CPU processes share the cores."""
        if torch_device != "cpu":
            super()._skip_if_insufficient_devices(world_size)

    @staticmethod
    def _prepare_config_headdim(config: LexConfig, requested_dim: int) -> LexConfig:
        """In LEX the width of a head follows from the sizes."""
        config.hidden_size = max(config.hidden_size, config.num_attention_heads * requested_dim)
        return config

    def test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions(self) -> None:
        """Not with the heads: their `forward` is transformers' own, with annotations that this test cannot read."""
        self.all_model_classes = (LexModel, LexForCausalLM)
        super().test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions()

    @unittest.skipUnless(shutil.which("g++"), "needs a C++ compiler")
    def test_torch_compile_for_training(self) -> None:
        """Not on accelerators only."""
        inspect.unwrap(ModelTesterMixin.test_torch_compile_for_training)(self)

    def test_config(self) -> None:
        ConfigTester(self, config_class=LexConfig, **self.fields).run_common_tests()


class LexBiasTest(LexModelTest):
    """A learned bias on the scores, and both other patterns of attention."""

    fields: ClassVar = {"position_embedding_type": "t5", "attention_pattern": ["sliding", "full"] * 12}


@skipping
class LexPipelineTest(PipelineTesterMixin, unittest.TestCase):
    """Pipelines, with models and a tokenizer that are made for it."""

    pipeline_model_mapping: ClassVar[dict[str, type[PreTrainedModel]]] = {
        "feature-extraction": LexModel,
        "text-classification": LexForSequenceClassification,
        "text-generation": LexForCausalLM,
        "token-classification": LexForTokenClassification,
        "zero-shot": LexForSequenceClassification,
    }

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        classes = set(cls.pipeline_model_mapping.values())
        for model_class in classes:
            save_tiny(model_class, Path(folder) / "lex" / model_class.__name__)
        summary = {"tokenizer_classes": ["PreTrainedTokenizerFast"], "processor_classes": []}
        known = {model_class.__name__: summary for model_class in classes}
        models = mock.patch.multiple(
            test_pipeline_mixin, TRANSFORMERS_TINY_MODEL_PATH=folder, tiny_model_summary=known
        )
        cls.enterClassContext(models)

    def skipTest(self, reason: str) -> None:  # noqa: N802
        self.fail(f"skipped, and not among SKIPS: {reason}")


def save_tiny(model_class: type[PreTrainedModel], folder: Path) -> None:
    """Save a model with labels, as zero-shot classification needs them, and its tokenizer."""
    labels = ("contradiction", "neutral", "entailment")
    names, numbers = dict(enumerate(labels)), {label: number for number, label in enumerate(labels)}
    tokenizer = byte_tokenizer()
    config = tiny_config(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, id2label=names, label2id=numbers
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@skipping
class LexExecutorchTest(test_executorch.ExecutorchTest):
    def setUp(self) -> None:
        set_seed(42)
        with mock.patch.object(test_executorch, "AutoModelForCausalLM") as auto:
            auto.from_pretrained.return_value = LexForCausalLM(tiny_config())
            super().setUp()


if unused_skips:
    raise ValueError(f"SKIPS holds patterns that no test has: {sorted(unused_skips)}")

"""Every causal language model of transformers reads in blocks exactly, or is refused with the reason."""

from pathlib import Path

import pytest
import torch
import transformers
from helpers.architectures import NOT_BUILT, architectures, parse, refusal, render, text_part, tiny_model
from helpers.rope_models import LENGTH, VOCABULARY, dense_mask
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

from lex_hf import blockwise, restore
from lex_hf.model.versions_lex import HYBRIDS_TAKE_BACK

BLOCK = LENGTH // 2
TOKENS, PADDING = 27, 6  # tokens of the first row, and how many fewer the second has
TOLERANCE = {"atol": 2e-5, "rtol": 0}
# Whatever the table says, these must be served: what most people run, and every kind of layer.
# fmt: off
SERVED = {
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_text", "mistral", "mixtral", "gemma",
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "phi", "phi3", "gpt_neox", "cohere", "cohere2", "olmo",
    "olmo2", "olmo3", "granite", "granitemoehybrid", "glm", "glm4", "smollm3", "ernie4_5", "exaone4", "gpt_oss",
    "llama4_text", "deepseek_v3", "stablelm", "starcoder2", "falcon_h1", "bamba", "nemotron_h", "lfm2",
}
# fmt: on
# Not with transformers before 5.15: layers with attention and states, and layers that attend to what others keep.
LATER = {"bamba", "falcon_h1", "gemma3n_text", "gemma4_text", "granitemoehybrid", "lfm2", "nemotron_h"}
SPECIAL = ("falcon_h1", "gemma3n_text", "gemma4_text", "qwen3_5_text")
PAGE = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
RESULTS = parse(PAGE)


def ids_of(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def logits_of_dense_masks(model: PreTrainedModel, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits of a model as it is, eager attention and all: of its masks, those that show everything show two blocks.

    Layers with another mask, as a sliding window, keep theirs.
    """
    full, blocks = (dense_mask(ids.shape[1], block) == 0 for block in (ids.shape[1], BLOCK))
    kinds = set()

    def mask(*args: object, **kwargs: object) -> torch.Tensor:
        own = eager_mask(*args, **kwargs)
        is_full = torch.equal(own == 0, full)
        kinds.add(is_full)
        return own.masked_fill(~blocks, torch.finfo(own.dtype).min) if is_full else own

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "eager", mask)
        logits = model(ids, use_cache=False).logits
    assert True in kinds
    if kinds == {True} and not has_states(model):  # then one mask for all layers is as good, and nothing is replaced
        added = dense_mask(ids.shape[1], BLOCK)
        with torch.no_grad():
            torch.testing.assert_close(model(ids, attention_mask=added, use_cache=False).logits, logits, **TOLERANCE)
    return logits


def is_of_this_version() -> bool:
    return f" transformers {transformers.__version__} " in PAGE


def has_states(model: PreTrainedModel) -> bool:
    """Whether some layers are recurrent or convolutions: these need a mask of their own."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return not set(kinds) <= {"full_attention", "sliding_attention"}


def read(model: PreTrainedModel, ids: torch.Tensor, pieces: list[int], mask: torch.Tensor) -> torch.Tensor:
    """Logits of a text that is read in pieces, with a cache."""
    cache, logits, end = None, [], 0
    for piece in ids.split(pieces, dim=1):
        end += piece.shape[1]
        output = model(piece, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def kinds() -> list[str]:
    """All architectures of the version that the table is of, of others those that most people run."""
    found = architectures() if is_of_this_version() else sorted(SERVED if HYBRIDS_TAKE_BACK else SERVED - LATER)
    return [kind for kind in found if kind not in NOT_BUILT]


@pytest.mark.parametrize("kind", kinds())
def test_logits_are_those_of_dense_masks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if text_part(kind) != kind:
        assert not is_of_this_version() or RESULTS[kind] == text_part(kind)
        return
    model, texts = tiny_model(kind), [ids_of(TOKENS, 0), ids_of(TOKENS - PADDING, 1)]
    reason = refusal(model)
    assert not is_of_this_version() or RESULTS[kind] == reason
    if reason:
        assert kind not in SERVED
        assert model.config.get_text_config(decoder=True)._attn_implementation == "eager"
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        return
    plain = tiny_model(kind)
    long, short = (logits_of_dense_masks(plain, ids, monkeypatch) for ids in texts)
    ones = torch.ones_like(texts[0])
    rows = torch.cat((texts[0], torch.nn.functional.pad(texts[1], (PADDING, 0))))
    mask = torch.ones_like(rows)
    mask[1, :PADDING] = 0
    with torch.no_grad():
        assert not torch.allclose(plain(texts[0], use_cache=False).logits, long, **TOLERANCE)
        torch.testing.assert_close(model(texts[0], use_cache=False).logits, long, **TOLERANCE)
        torch.testing.assert_close(read(model, texts[0], [TOKENS], ones), long, **TOLERANCE)
        torch.testing.assert_close(read(model, texts[0], [9, 2, 7, 9], ones), long, **TOLERANCE)
        begin = texts[0][:, : 2 * LENGTH - 3]  # the first pair of blocks and the next one
        torch.testing.assert_close(
            read(model, begin, [1] * begin.shape[1], ones), long[:, : begin.shape[1]], **TOLERANCE
        )
        padded = [model(rows, attention_mask=mask, use_cache=False).logits, read(model, rows, [19, 8], mask)]
    for logits in padded:
        torch.testing.assert_close(logits[:1], long, **TOLERANCE)
        torch.testing.assert_close(logits[1:, PADDING:], short, **TOLERANCE)
    if kind not in SERVED:
        return
    blockwise(restore(model), LENGTH, sinks=1)
    with torch.no_grad():
        whole = model(texts[0], use_cache=False).logits
        torch.testing.assert_close(read(model, texts[0], [9, 2, 7, 9], ones), whole, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind in SPECIAL])
def test_generation_with_and_without_cache(kind: str, mode: dict[str, int]) -> None:
    """Caches that are states too, keys of other layers, and layers that are told which logits are wanted."""
    model, prompt = blockwise(tiny_model(kind), LENGTH), torch.cat((ids_of(9, 0), ids_of(9, 1)))
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    given = {"attention_mask": mask, "max_new_tokens": 13, "do_sample": False, "eos_token_id": None, **mode}
    assert torch.equal(*(model.generate(prompt, use_cache=use_cache, **given) for use_cache in (True, False)))


@pytest.mark.skipif(not is_of_this_version(), reason="the table is of another version of transformers")
def test_the_page_has_every_architecture() -> None:
    assert list(RESULTS) == architectures()
    assert render(RESULTS, transformers.__version__) == PAGE


@pytest.mark.skipif(HYBRIDS_TAKE_BACK, reason="this version of transformers has what they need")
@pytest.mark.parametrize("kind", sorted(LATER & {"falcon_h1", "gemma3n_text", "lfm2"}))
def test_what_an_older_version_lacks_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="cannot be made blockwise: "):
        blockwise(tiny_model(kind), LENGTH)


@pytest.mark.skipif(not is_of_this_version(), reason="the table is of another version of transformers")
@pytest.mark.parametrize("kind", NOT_BUILT)
def test_transformers_does_not_build_it(kind: str) -> None:
    assert RESULTS[kind] == NOT_BUILT[kind]
    with pytest.raises(ValueError, match="layer types producing a cache"):
        tiny_model(kind)

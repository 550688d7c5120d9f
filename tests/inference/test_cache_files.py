"""A cache on disk: the same text goes on in another process, and no other file is taken for it."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forks import PACKAGE
from helpers.models import PATTERNS, random_ids, tiny_model
from safetensors.torch import save_file

from lex_hf import LexCache, LexForCausalLM, LexStaticCache, load_cache, save_cache


def read(model: LexForCausalLM, length: int, batch: int = 2, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(random_ids(batch, length), **kwargs).past_key_values


def next_logits(model: LexForCausalLM, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, 20, seed=5), past_key_values=cache).logits


@pytest.mark.parametrize("fields", PATTERNS)
@pytest.mark.parametrize("length", [3, 14, 40])
@pytest.mark.parametrize("static", [False, True])
def test_a_restored_cache_goes_on_identically(
    tmp_path: Path, fields: dict[str, Any], length: int, static: bool
) -> None:
    model, path = tiny_model(**fields), tmp_path / "cache.safetensors"
    cache = read(model, length, past_key_values=LexStaticCache(model.config, 100) if static else None)
    save_cache(cache, model, path)
    restored = load_cache(path, model)
    assert type(restored) is type(cache)
    assert int(restored.get_seq_length()) == length
    assert torch.equal(next_logits(model, restored), next_logits(model, cache))
    assert [file.name for file in tmp_path.iterdir()] == ["cache.safetensors"]


def test_rows_of_different_lengths_are_restored(tmp_path: Path) -> None:
    model, mask = tiny_model(), torch.ones(2, 20)
    mask[1, :9] = 0
    cache = read(model, 20, attention_mask=mask)
    save_cache(cache, model, tmp_path / "cache")
    restored = load_cache(tmp_path / "cache", model)
    assert restored.layers[0].lengths.tolist() == [20, 11]
    mask = torch.cat((mask, torch.ones(2, 4)), dim=1)
    with torch.no_grad():
        expected, found = (
            model(random_ids(2, 4, seed=5), attention_mask=mask, past_key_values=each).logits
            for each in (cache, restored)
        )
    assert torch.equal(found, expected)


@pytest.mark.processes
def test_another_process_goes_on(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    cache = read(model, 100)
    save_cache(cache, model, tmp_path / "cache.safetensors")
    assert (tmp_path / "cache.safetensors").stat().st_size < 2 * cache.nbytes()
    torch.save(next_logits(model, cache), tmp_path / "expected.pt")
    code = f"""
    import torch
    from transformers import AutoModelForCausalLM
    from lex_hf import load_cache
    torch.set_num_threads({torch.get_num_threads()})
    model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r})
    cache = load_cache({str(tmp_path / "cache.safetensors")!r}, model)
    ids = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        found = model(ids, past_key_values=cache).logits
    assert torch.equal(found, torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True))
    """
    process = PACKAGE.run("-c", textwrap.dedent(code))
    assert process.returncode == 0, process.stderr


def test_other_files_are_refused(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "cache.safetensors"
    save_cache(read(model, 30), model, path)
    whole = path.read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is truncated or corrupt"):
            load_cache(path, model)
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="is not a LexCache: its format is None"):
        load_cache(path, model)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*absent"):
        load_cache(tmp_path / "absent", model)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"attention_pattern": "full"}, "blocks"),
        ({"block_length": 5}, "blocks"),
        ({"xpos_scale_base": 8}, "positions"),
        ({"position_embedding_type": "rope"}, "positions"),
        ({"seed": 1}, "weights"),
        ({"dtype": torch.float64}, "dtype"),
    ],
)
def test_a_cache_of_another_model_is_refused(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    save_cache(read(tiny_model(), 30), tiny_model(), tmp_path / "cache")
    with pytest.raises(ValueError, match=f"written by another model: its {what} are"):
        load_cache(tmp_path / "cache", tiny_model(**other))


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.post_attention_layernorm.bias",
    ],
)
def test_a_cache_belongs_to_the_very_weights_that_filled_it(tmp_path: Path, name: str) -> None:
    """As after merging a LoRA, or a single number that was changed."""
    model, path = tiny_model(), tmp_path / "cache"
    save_cache(read(model, 30), model, path)
    weight = model.get_parameter(name).data.view(-1)
    weight[len(weight) // 2] += 1e-3
    with pytest.raises(ValueError, match="written by another model: its weights are"):
        load_cache(path, model)
    weight[len(weight) // 2] -= 1e-3
    weight[[0, -1]] = weight[[-1, 0]]  # the same numbers at other places
    with pytest.raises(ValueError, match="written by another model: its weights are"):
        load_cache(path, model)


def test_what_keys_and_values_do_not_depend_on_may_differ(tmp_path: Path) -> None:
    model = tiny_model()
    save_cache(read(model, 30), model, tmp_path / "cache")
    model.lm_head.weight.data.zero_()
    model.model.norm.weight.data.zero_()
    assert load_cache(tmp_path / "cache", model).get_seq_length() == 30


def test_padding_that_was_read_is_still_known_after_loading(tmp_path: Path) -> None:
    model, mask = tiny_model(), torch.ones(2, 20)
    mask[1, :9] = 0
    for static in (False, True):
        given = LexStaticCache(model.config, 40) if static else None
        save_cache(read(model, 20, attention_mask=mask, past_key_values=given), model, tmp_path / "cache")
        wrong = torch.ones(2, 21)
        wrong[1, 3:12] = 0
        with torch.no_grad(), pytest.raises(ValueError, match="a token that was read cannot become padding"):
            model(random_ids(2, 1), attention_mask=wrong, past_key_values=load_cache(tmp_path / "cache", model))


def test_a_file_of_version_0_1_0_is_refused_with_what_to_do(tmp_path: Path) -> None:
    save_file({"0.keys": torch.zeros(1)}, tmp_path / "old", metadata={"format": "lex_hf cache 1"})
    with pytest.raises(ValueError, match=r"earlier version of lex_hf, such as 0\.1\.0.* read the text again"):
        load_cache(tmp_path / "old", tiny_model())


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="The cache is empty"):
        save_cache(LexCache(model.config), model, tmp_path / "cache")
    with pytest.raises(ValueError, match="dict is not a LexCache"):
        save_cache({}, model, tmp_path / "cache")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())

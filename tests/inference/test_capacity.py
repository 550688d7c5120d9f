"""Bytes on paper are those of real caches and weights; rows and tokens per second are recounted."""

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import architectures
from helpers.models import SIZES, tiny_model
from helpers.rope_models import rope_model
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, T5Config

from lex_hf import LexConfig, LexStaticCache, blockwise
from lex_hf.inference import machine
from lex_hf.inference.capacity import LENGTHS, Capacity, capacity
from lex_hf.model.cache_layer_lex import LexCacheLayer
from lex_hf.model.versions_lex import HYBRIDS_TAKE_BACK

DEVICE: dict[str, Any] = {"device_memory": 2**30, "bandwidth": 10**9}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_BLOCKS = (
    "gemma2",  # windows beside full attention
    "gemma3",  # and a part for images
    "gemma3n_text",  # layers that attend to the keys of others
    "deepseek_v3",  # keys that are wider than values
    "lfm2",  # convolutions
    "qwen3_next",  # recurrences, and experts
    "falcon_h1",  # attention and recurrences in one layer
    "mixtral",
    "gpt_neox",
)
LATER = ("gemma3n_text", "lfm2", "falcon_h1")  # which older versions of transformers do not read in blocks
WITHOUT_BLOCKS = ("gpt_bigcode", "bloom", "gpt2")
PATTERNS = st.sampled_from(["blockwise", "sliding", "full"])


def storage(layer: Any) -> int:
    """Bytes of one layer of a cache: of all tensors that have a row, each storage as it was allocated."""
    if isinstance(layer, LexCacheLayer):
        own = layer.nbytes()
        states = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    else:
        own = 0
        states = [getattr(layer, name, None) for name in ("keys", "values", "conv_states", "recurrent_states")]
    several = [each for state in states for each in (state.values() if isinstance(state, dict) else [state])]
    return own + sum(each.untyped_storage().nbytes() for each in several if each is not None)


def read(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of transformers' cache after so many tokens, the last of them a step."""
    cache = DynamicCache(config=model.config.get_text_config())
    ids = torch.arange(tokens)[None] % 50 + 1
    with torch.no_grad():
        for piece in ids.split([tokens - 1, 1], dim=1):
            model(input_ids=piece, past_key_values=cache, use_cache=True)
    return sum(storage(layer) for layer in cache.layers)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6]),
    patterns=st.one_of(PATTERNS, st.lists(PATTERNS, min_size=3, max_size=3)),
    layers=st.integers(1, 3),
    half=st.integers(1, 6),
    block=st.one_of(st.none(), st.integers(1, 9)),
    window=st.one_of(st.none(), st.integers(1, 9)),
    dtype=st.sampled_from(list(DTYPES)),
    length=st.integers(1, 40),
)
def test_a_row_of_lex_takes_what_its_static_cache_allocates(
    heads: int,
    head_dim: int,
    patterns: Any,
    layers: int,
    half: int,
    block: int | None,
    window: int | None,
    dtype: str,
    length: int,
) -> None:
    sizes = {"num_attention_heads": heads, "hidden_size": heads * head_dim, "num_hidden_layers": layers}
    fields = {**sizes, "attention_pattern": patterns, "block_length": block, "sliding_window": window}
    config = LexConfig(**{**SIZES, "training_length": 2 * half, **fields})
    found = capacity(config, **DEVICE, dtype=dtype, lengths=(length,))
    for rows, pattern in ((found.blocks, patterns), (found.full, "full")):
        if not rows:
            assert set(config.layer_patterns) == {"full"}
            continue
        model = tiny_model(
            dtype=DTYPES[dtype], **{"training_length": 2 * half, **fields, "attention_pattern": pattern}
        )
        cache = LexStaticCache(model.config, max_cache_len=length)
        with torch.no_grad():
            model(torch.tensor([[5]]), past_key_values=cache)
        assert [each.row_bytes for each in rows] == [cache.nbytes()]
        is_constant = "full" not in model.config.layer_patterns
        assert [each.tokens for each in rows] == [None if is_constant else length]


@settings(max_examples=20, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([4, 8, 10]),
    layers=st.integers(1, 3),
    length=st.integers(4, 8).map(lambda half: 2 * half),
    sinks=st.integers(0, 2),
    dtype=st.sampled_from(list(DTYPES)),
    tokens=st.integers(2, 30),
)
def test_a_row_in_blocks_takes_what_its_cache_allocates(
    groups: int, head_dim: int, layers: int, length: int, sinks: int, dtype: str, tokens: int
) -> None:
    fields = {"num_key_value_heads": groups, "head_dim": head_dim, "num_hidden_layers": layers}
    model = rope_model("llama", **fields, max_position_embeddings=length).to(DTYPES[dtype])
    model.config.dtype = DTYPES[dtype]
    found = capacity(model.config, **DEVICE, blockwise="auto", sinks=sinks, lengths=(tokens,))
    assert found.dtype == dtype
    assert [(each.tokens, each.row_bytes) for each in found.full] == [(tokens, read(model, tokens))]
    blocks = read(blockwise(model, sinks=sinks), tokens)
    assert [(each.tokens, each.row_bytes) for each in found.blocks] == [(None, blocks)]


@pytest.mark.parametrize("kind", [*IN_BLOCKS, *WITHOUT_BLOCKS])
def test_every_kind_of_layer_is_counted(kind: str) -> None:
    if kind not in architectures.architectures():
        pytest.skip(f"this version of transformers has no {kind}")
    config = architectures.tiny_config(kind)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    lengths = (4, 23)
    found = capacity(config, **DEVICE, lengths=lengths)
    assert [each.row_bytes for each in found.full] == [read(model, tokens) for tokens in lengths]
    assert found.blocks == ()
    assert found.weights_bytes == sum(each.nbytes for each in model.parameters())
    if kind in WITHOUT_BLOCKS or (kind in LATER and not HYBRIDS_TAKE_BACK):
        return
    for sinks in (0, 1):
        in_blocks = capacity(config, **DEVICE, blockwise=architectures.LENGTH, sinks=sinks, lengths=lengths)
        changed = blockwise(copy.deepcopy(model), architectures.LENGTH, sinks=sinks)
        # A window that is not full yet is smaller: the one number is that of any text that is longer.
        assert [each.row_bytes for each in in_blocks.blocks] == [read(changed, 23)]


def test_a_window_longer_than_the_training_length_becomes_blocks() -> None:
    fields = {"sliding_window": 20, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}
    model = rope_model("qwen3", **fields)
    found = capacity(model.config, **DEVICE, blockwise=8, lengths=(30,))
    assert found.full[0].row_bytes == read(model, 30) == 3 * 20 * 2 * 2 * 8 * 4
    assert found.blocks[0].row_bytes == read(blockwise(model, 8), 30) == 3 * 8 * 2 * 2 * 8 * 4
    with pytest.raises(ValueError, match="sees more tokens than its training length of 20"):
        capacity(model.config, **DEVICE, blockwise=20)


@pytest.mark.parametrize("scheme", ["xpos", "learned", "alibi"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_reads_all_weights_but_embeddings(scheme: str, is_tied: bool) -> None:
    model = tiny_model(position_embedding_type=scheme, tie_word_embeddings=is_tied)
    sizes = {name: each.nbytes for name, each in model.named_parameters()}
    found = capacity(model.config, **DEVICE)
    assert found.weights_bytes == sum(sizes.values())
    assert found.parameters == sum(sizes.values()) // 4
    unread = 0 if is_tied else 97 * 30 * 4
    unread += 14 * 30 * 4 if scheme == "learned" else 0
    assert found.weights_read == found.weights_bytes - unread


def recounted(found: Capacity, rows: int, row_bytes: int) -> Fraction:
    """Tokens per second of so many rows: one for each, in the time that it takes to read what a step reads."""
    seconds = Fraction(found.weights_read + sum(row_bytes for _ in range(rows))) / Fraction(found.bandwidth)
    return rows / seconds


@settings(max_examples=40, deadline=None)
@given(memory=st.integers(1, 2**21), bandwidth=st.integers(1, 10**13), tied=st.booleans())
def test_rows_fill_nine_tenths_of_the_memory(memory: int, bandwidth: int, tied: bool) -> None:
    config = LexConfig(**{**SIZES, "tie_word_embeddings": tied})
    found = capacity(config, device_memory=memory, bandwidth=bandwidth, lengths=(1, 50, 3000))
    room = Fraction(9, 10) * memory
    assert found.weights_fit is (found.weights_bytes < room - 1)
    for each in (*found.blocks, *found.full):
        if each.rows == 0:
            assert found.weights_bytes + each.row_bytes > room - 1
            assert each.tokens_per_second is each.tokens_per_second_alone is None
            continue
        assert found.weights_bytes + each.rows * each.row_bytes <= room
        assert found.weights_bytes + (each.rows + 1) * each.row_bytes > room - 1  # which is a whole number of bytes
        assert each.tokens_per_second == pytest.approx(float(recounted(found, each.rows, each.row_bytes)))
        assert each.tokens_per_second_alone == pytest.approx(float(recounted(found, 1, each.row_bytes)))
    rows = [each.rows for each in found.full]
    assert rows == sorted(rows, reverse=True)


def test_figures_that_are_known() -> None:
    """GPT-medium: 24 layers of 1024 and 1024 slots of keys and of values; a Llama of 8 billion parameters."""
    medium = capacity(LexConfig(), device_memory=80 * 2**30, bandwidth=3.35e12)
    assert (medium.dtype, medium.attention, medium.is_lex) == ("float32", "blockwise", True)
    assert [each.row_bytes for each in medium.blocks] == [2 * 24 * 1024 * 1024 * 4]
    assert [each.row_bytes for each in medium.full] == [2 * 24 * tokens * 1024 * 4 for tokens in LENGTHS]
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "dtype": "bfloat16"}
    config = LlamaConfig(**sizes, max_position_embeddings=8192)
    llama = capacity(config, device_memory=80 * 2**30, bandwidth=3.35e12, blockwise="auto", sinks=4)
    assert (llama.parameters, llama.dtype, llama.is_lex) == (8_030_261_248, "bfloat16", False)
    token = 2 * 32 * 8 * 128 * 2
    assert [each.row_bytes for each in llama.full] == [token * tokens for tokens in LENGTHS]
    assert [each.row_bytes for each in llama.blocks] == [token * (4 + 2 * 4094 + 4)]
    assert config.pad_token_id is None  # as it was


def test_a_model_of_any_size_takes_no_memory() -> None:
    config = LexConfig(hidden_size=2**14, num_attention_heads=128, intermediate_size=2**16, num_hidden_layers=300)
    found = capacity(config, **DEVICE)
    assert found.parameters > 9 * 10**11
    assert not found.weights_fit
    assert [each.rows for each in (*found.blocks, *found.full)] == [0] * 4


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LexConfig(), {"device_memory": 0}, "device_memory = 0: it must be a positive number"),
        (LexConfig(), {"bandwidth": float("nan")}, "bandwidth = nan: it must be a positive number"),
        (LexConfig(), {"bandwidth": float("inf")}, "bandwidth = inf: it must be a positive number"),
        (LexConfig(), {"dtype": "int8"}, "dtype = 'int8': it must be one of float32"),
        (LexConfig(), {"blockwise": "auto"}, "A LEX model has blocks of its own"),
        (LexConfig(), {"lengths": (0,)}, "lengths = \\(0,\\): each must be a number of tokens"),
        (LlamaConfig(), {"sinks": 4}, "sinks = 4: only a model that reads in blocks"),
        (LlamaConfig(), {"blockwise": 7}, "training_length = 7: it must be an even number"),
        (LlamaConfig(), {"blockwise": 8, "sinks": 4}, "at most 2"),
        (LlamaConfig(quantization_config={"quant_method": "gptq"}), {}, "The weights are quantised"),
        (T5Config(), {}, "is a T5Config, and transformers has no causal language model for it"),
        (LlamaConfig(hidden_size=2**62), {}, "A model of this configuration cannot be made"),
    ],
)
def test_what_cannot_be_counted_is_an_error(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capacity(config, **{**DEVICE, **options})


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("recurrent_gemma", r"keeps nothing in layers \[0, 1\] of its cache"),
        ("deepseek_v32", "keeps its past in a DynamicIndexedLayer"),
        ("dbrx", "does not read without its weights"),
    ],
)
def test_a_cache_of_another_kind_is_an_error(kind: str, what: str) -> None:
    if kind not in architectures.architectures():
        pytest.skip(f"this version of transformers has no {kind}")
    with pytest.raises(ValueError, match=f"The cache of .* cannot be counted: the model {what}"):
        capacity(architectures.tiny_config(kind), **DEVICE)


def test_the_memory_that_is_available_is_what_linux_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemFree:  3 kB\nMemAvailable:     42 kB\n")
    assert machine._available(meminfo) == 42 * 1024
    monkeypatch.setattr(machine.os, "sysconf_names", {"SC_AVPHYS_PAGES": 1, "SC_PAGE_SIZE": 2})
    monkeypatch.setattr(machine.os, "sysconf", {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert machine._available(tmp_path / "none") == 7 * 4096
    monkeypatch.setattr(machine.os, "sysconf_names", {})
    assert machine._available(tmp_path / "none") is None
    monkeypatch.setattr(machine, "_available", lambda path: None)
    with pytest.raises(ValueError, match="does not say how much memory is available"):
        machine.memory_of(torch.device("cpu"))


def test_bandwidth_is_that_of_the_fastest_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 0.5, 1.0, 1.125, 2.0, 2.25, 3.0, 3.5])  # reads of 0.5, 0.125 and 0.25 seconds
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks))
    assert machine.measure_bandwidth(torch.device("cpu"), 8 * 4096) == 4096 / 0.125
    assert next(ticks) == 3.0  # enough is enough


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "it must be a device of torch"),
        ("cuda:99", r"torch finds \d+ CUDA devices? here"),
        ("mps", "found for 'cpu' and 'cuda' only; give both"),
    ],
)
def test_devices_that_are_not_here_are_an_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        machine.device_of(name)


def test_a_device_is_chosen_as_models_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.device_of("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.device_of(None) == machine.device_of("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.device_of(None) == torch.device("cuda")
    assert machine.device_of("cuda:1") == torch.device("cuda:1")

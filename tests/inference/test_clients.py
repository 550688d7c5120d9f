"""The real clients around transformers: pipelines, streamers, Trainer, accelerate, torch.export, torch.compile.

What needs a package of its own is in test_clients_extra.py.
"""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from datasets import Dataset
from helpers.models import needs_whole_graphs, random_ids, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AsyncTextIteratorStreamer,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from lex_hf import LexCache, LexForCausalLM, LexStaticCache
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.model.versions_lex import HYBRIDS_TAKE_BACK

PROMPTS = ["In a hole in the ground", "né", "There lived a test; it had failed once, and it would never fail again."]
CPU = torch.device("cpu")


def byte_model(**fields: Any) -> LexForCausalLM:
    """A model of bytes, whose end-of-text token never comes."""
    fields = {"vocab_size": 257, "bos_token_id": 256, "pad_token_id": 256} | fields
    return tiny_model(dtype=torch.float64, **fields)


def continuation(model: LexForCausalLM, prompt: str, tokens: int) -> str:
    """What the model itself generates after a prompt alone, greedily."""
    words = byte_tokenizer()
    inputs = words(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return words.decode(output[0, inputs["input_ids"].shape[1] :])


class TestPipeline:
    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_generates_what_the_model_generates(self, batch_size: int) -> None:
        model = byte_model()
        expected = [continuation(model, prompt, 30) for prompt in PROMPTS]
        assert len(set(expected)) == len(expected)
        generator = pipeline("text-generation", model=model, tokenizer=byte_tokenizer())
        results = generator(PROMPTS, batch_size=batch_size, max_new_tokens=30, do_sample=False)
        assert [result[0]["generated_text"] for result in results] == [
            prompt + text for prompt, text in zip(PROMPTS, expected, strict=True)
        ]

    def test_loads_a_folder(self, tmp_path: Path) -> None:
        model = byte_model()
        model.save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
        generator = pipeline("text-generation", model=str(tmp_path))
        (result,) = generator(PROMPTS[0], max_new_tokens=30, do_sample=False, return_full_text=False)
        assert result["generated_text"] == continuation(model, PROMPTS[0], 30)


class TestStreamers:
    def test_pieces_of_text_come_while_the_model_generates(self) -> None:
        model, words = byte_model(), byte_tokenizer()
        streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
        inputs = words(PROMPTS[0], return_tensors="pt")
        options = {"max_new_tokens": 30, "do_sample": False, "streamer": streamer}
        thread = Thread(target=model.generate, kwargs={**inputs, **options})
        thread.start()
        pieces = list(streamer)
        thread.join()
        assert len(pieces) > 1
        assert "".join(pieces) == continuation(model, PROMPTS[0], 30)

    def test_asynchronously(self) -> None:
        model, words = byte_model(), byte_tokenizer()

        async def stream() -> list[str]:
            streamer = AsyncTextIteratorStreamer(words, skip_prompt=True, timeout=60)
            inputs = words(PROMPTS[0], return_tensors="pt")
            options = {"max_new_tokens": 30, "do_sample": False, "streamer": streamer}
            thread = Thread(target=model.generate, kwargs={**inputs, **options})
            thread.start()
            pieces = [piece async for piece in streamer]
            thread.join()
            return pieces

        assert "".join(asyncio.run(stream())) == continuation(model, PROMPTS[0], 30)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trainer_on_flattened_documents_takes_the_step_of_the_single_documents(attention: str, tmp_path: Path) -> None:
    model = byte_model(attn_implementation=attention).float().train()
    # Within a pair of blocks, at its border, and over several blocks (of 7 tokens).
    documents = [random_ids(length, seed=length).tolist() for length in (5, 14, 15, 40)]
    by_hand, total, count = copy.deepcopy(model), torch.zeros(()), sum(len(ids) - 1 for ids in documents)
    for ids in documents:
        row = torch.tensor([ids])
        total = total + by_hand(row, labels=row, use_cache=False).loss * (len(ids) - 1)
    expected = total / count
    expected.backward()

    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=len(documents),
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    dataset = Dataset.from_dict({"input_ids": documents})
    trainer = Trainer(model, arguments, train_dataset=dataset, data_collator=DataCollatorWithFlattening())
    (batch,) = trainer.get_train_dataloader()
    assert batch["input_ids"].shape == (1, 5 + 14 + 15 + 40)
    assert trainer.train().training_loss == pytest.approx(expected.item(), abs=1e-5)
    for (name, trained), parameter in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(trained, parameter - 0.5 * parameter.grad, atol=1e-5, rtol=0, msg=name)


class TestAccelerate:
    """Weights that wait elsewhere, and layers that lie elsewhere: same logits, same tokens."""

    # Two schemes learn parameters outside of the layers, one within them.
    schemes = pytest.mark.parametrize("scheme", ["xpos", "t5", "kerple", "shaw"])

    def assert_same(self, model: LexForCausalLM, other: Any) -> None:
        ids = random_ids(2, 40)
        with torch.no_grad():
            assert torch.equal(other(ids).logits, model(ids).logits)
        options = {"max_new_tokens": 25, "do_sample": False}
        assert torch.equal(other.generate(ids[:, :20], **options), model.generate(ids[:, :20], **options))

    def waiting(self, model: Any) -> set[str]:
        return {name for name, parameter in model.named_parameters() if parameter.is_meta}

    def test_device_map_auto(self, tmp_path: Path) -> None:
        model = tiny_model()
        model.save_pretrained(tmp_path)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto").to(CPU)
        self.assert_same(model, loaded)

    @schemes
    @pytest.mark.parametrize("part", ["layers", "all"])
    def test_weights_left_on_disk(self, scheme: str, part: str, tmp_path: Path) -> None:
        model = tiny_model(position_embedding_type=scheme)
        model.save_pretrained(tmp_path / "model")
        if part == "all" and not HYBRIDS_TAKE_BACK:
            pytest.skip(
                "with this version of transformers, the logits of any model of which all is on disk are nowhere"
            )
        devices = dict.fromkeys(("model.embed_tokens", "model.positions", "model.norm", "lm_head"), "cpu")
        devices = {"": "disk"} if part == "all" else devices | {"model.layers": "disk"}
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=devices, offload_folder=tmp_path / "offloaded"
        )
        names = {name for name, _ in model.named_parameters() if part == "all" or ".layers." in name}
        assert self.waiting(loaded) == names
        self.assert_same(model, loaded)

    @schemes
    @pytest.mark.parametrize("place", ["cpu", "disk"])
    def test_offload_of_a_model_at_hand(self, scheme: str, place: str, tmp_path: Path) -> None:
        model = tiny_model(position_embedding_type=scheme)
        if place == "cpu":
            offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=CPU)
        else:
            offloaded = accelerate.disk_offload(copy.deepcopy(model), tmp_path, execution_device=CPU)
        assert self.waiting(offloaded) == {name for name, _ in model.named_parameters()}
        self.assert_same(model, offloaded)

    @schemes
    @pytest.mark.parametrize("layout", ["plain", "padded", "packed", "continued", "continued raggedly", "static"])
    def test_layers_on_two_devices(self, scheme: str, layout: str) -> None:
        """The second device is `meta`, which has no numbers but complains like any other about tensors elsewhere."""
        model, ids = tiny_model(position_embedding_type=scheme), random_ids(2, 40)
        for name in ("model.layers.1", "model.norm", "lm_head"):
            module = model.get_submodule(name).to("meta")
            hook = AlignDevicesHook(execution_device="meta", skip_keys=model._skip_keys_device_placement)
            add_hook_to_module(module, hook)
        mask = torch.ones(2, 81, dtype=torch.long)
        mask[1, :3] = 0
        with torch.no_grad():
            if layout == "plain":
                logits = [model(ids, use_cache=False).logits]
            elif layout == "padded":
                logits = [model(ids, attention_mask=mask[:, :40], use_cache=False).logits]
            elif layout == "packed":
                logits = [model(ids, position_ids=torch.arange(40)[None] % 9).logits]
            elif layout == "static":  # longer pieces look at counts, and `meta` has none
                cache = LexStaticCache(model.config, max_cache_len=100)
                logits = [model(ids[:, :1], past_key_values=cache).logits for _ in range(3)]
            else:
                masks = mask if layout == "continued raggedly" else torch.ones_like(mask)
                cache = LexCache(model.config)
                logits = [
                    model(piece, attention_mask=masks[:, :end], past_key_values=cache).logits
                    for piece, end in ((ids, 40), (ids[:, :1], 41), (ids, 81))
                ]
        assert {each.device.type for each in logits} == {"meta"}
        assert all(each.shape[-1] == 97 for each in logits)


BLOCK = 7  # of tiny_model(); a pair of blocks is 14 tokens
# A graph serves the lengths that are cut alike. Of each: an example, the dimension, lengths served, one that is not.
GRAPHS: dict[str, tuple[int, Any, tuple[int, ...], int]] = {
    "a pair of blocks": (10, torch.export.Dim("length", min=2, max=2 * BLOCK), (2, 7, 8, 13, 14), 15),
    "whole blocks": (28, BLOCK * torch.export.Dim("blocks", min=4, max=300), (28, 35, 77, 700), 40),
    "blocks and a rest": (40, torch.export.Dim.AUTO, (30, 33, 40, 55, 300), 35),
}


@needs_whole_graphs
class TestExport:
    @pytest.mark.parametrize("fields", [{}, {"attention_pattern": "full"}, {"position_embedding_type": "t5"}])
    @pytest.mark.parametrize("length", [9, 14, 40])
    def test_of_one_length(self, length: int, fields: dict[str, Any]) -> None:
        model, ids = tiny_model(dtype=torch.float64, **fields), random_ids(2, length)
        exported = torch.export.export(model, (ids,), {"use_cache": False}).module()
        for seed in (0, 1):
            ids = random_ids(2, length, seed=seed)
            torch.testing.assert_close(exported(ids, use_cache=False).logits, model(ids).logits, atol=1e-9, rtol=0)

    @pytest.mark.parametrize("padded", [False, True])
    @pytest.mark.parametrize("graph", GRAPHS)
    def test_of_all_lengths_that_are_cut_alike(self, graph: str, padded: bool) -> None:
        model = tiny_model(dtype=torch.float64, num_hidden_layers=1)
        length, dimension, served, refused = GRAPHS[graph]

        def inputs(length: int) -> dict[str, torch.Tensor]:
            mask = torch.ones(2, length, dtype=torch.long)
            mask[1, : length // 2] = 0
            ids = random_ids(2, length, seed=length)
            return {"input_ids": ids, "attention_mask": mask} if padded else {"input_ids": ids}

        shapes = {name: {1: dimension} for name in inputs(length)} | {"use_cache": None}
        exported = torch.export.export(
            model, (), {**inputs(length), "use_cache": False}, dynamic_shapes=shapes
        ).module()
        for length in served:
            expected = model(**inputs(length), use_cache=False).logits
            logits = exported(**inputs(length), use_cache=False).logits
            torch.testing.assert_close(logits, expected, atol=1e-9, rtol=0)
        with pytest.raises(AssertionError, match="Guard failed"):
            exported(**inputs(refused), use_cache=False)

    def test_of_full_attention_serves_every_length(self) -> None:
        model = tiny_model(dtype=torch.float64, attention_pattern="full")
        shapes = {"input_ids": {1: torch.export.Dim("length", min=2, max=500)}, "use_cache": None}
        example = {"input_ids": random_ids(2, 10), "use_cache": False}
        exported = torch.export.export(model, (), example, dynamic_shapes=shapes).module()
        for length in (2, 14, 15, 100):
            ids = random_ids(2, length)
            logits = exported(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(logits, model(ids).logits, atol=1e-9, rtol=0)


# Layouts of a batch of two rows: what a step of training is given beside the ids.
LAYOUTS: dict[str, Callable[[int], dict[str, torch.Tensor]]] = {
    "plain": lambda length: {},
    "left-padded": lambda length: {"attention_mask": torch.arange(length).expand(2, -1) >= torch.tensor([[0], [3]])},
    "packed": lambda length: {"position_ids": torch.arange(length)[None] % 9},
}


@needs_whole_graphs
@pytest.mark.usefixtures("fresh_compiler")
class TestCompile:
    """What recompiles is decided before any backend, so `eager` counts it.

    `aot_eager` is all the tracing and differentiation of the default backend without a C compiler.
    """

    @pytest.mark.parametrize(
        ("layout", "backend", "fields"),
        [
            ("left-padded", "eager", {"attn_implementation": "eager"}),
            ("packed", "eager", {}),
            ("plain", "aot_eager", {}),
            ("plain", "eager", {"attention_pattern": "full"}),
        ],
    )
    def test_a_training_step_has_no_graph_break_and_few_graphs(
        self, layout: str, backend: str, fields: dict[str, Any]
    ) -> None:
        model = tiny_model(dtype=torch.float64, num_hidden_layers=1, **fields).train()
        counter = CompileCounterWithBackend(backend)

        def loss(ids: torch.Tensor, **layout: torch.Tensor) -> torch.Tensor:
            return model(ids, labels=ids, use_cache=False, **layout).loss

        compiled, counts = torch.compile(loss, fullgraph=True, backend=counter), []
        for length in (72, 61, 80):
            ids, options = random_ids(2, length, seed=length), LAYOUTS[layout](length)
            expected, gradients = self.differentiate(model, loss(ids, **options))
            actual, ours = self.differentiate(model, compiled(ids, **options))
            torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
            for name, gradient in gradients.items():
                torch.testing.assert_close(ours[name], gradient, atol=1e-12, rtol=1e-12, msg=name)
            counts.append(counter.frame_count)
        assert counts == [1, 2, 2]  # one for the first length, one for all that are cut into blocks likewise

    def differentiate(self, model: LexForCausalLM, loss: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        model.zero_grad()
        loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

"""The interface of continuous batching: results as they come, cancelling, pausing, stopping, and what is refused."""

import asyncio
import copy
import functools
import queue
import threading
from typing import Any

import pytest
import torch
from helpers.models import PATTERNS, needs_rows, random_ids, tiny_model
from helpers.rope_models import rope_model
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints

from lex_hf import LexForCausalLM, blockwise, restore
from lex_hf.inference.batching import BlockBatchingManager

pytestmark = needs_rows
PROMPTS = [random_ids(1, length, seed=length)[0].tolist() for length in (1, 5, 14, 15, 33, 60)]


@functools.cache
def model() -> LexForCausalLM:
    return tiny_model()


def small(**fields: Any) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(**{"max_requests_per_batch": 3, "max_batch_tokens": 16} | fields)


def alone(ids: list[int], new: int, seed: int | None = None, **settings: Any) -> list[int]:
    if seed is not None:
        torch.manual_seed(seed)
    settings = {"do_sample": seed is not None, "max_new_tokens": new} | settings
    return model().generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()


class TestGenerateBatch:
    def test_results_are_in_the_order_of_the_prompts_and_what_each_writes_alone(self) -> None:
        results = model().generate_batch(PROMPTS, max_new_tokens=30, continuous_batching_config=small())
        assert list(results) == [f"req_{index}" for index in range(len(PROMPTS))]
        for ids, output in zip(PROMPTS, results.values(), strict=True):
            assert isinstance(output, GenerationOutput)
            assert output.prompt_ids == ids
            assert output.generated_tokens == alone(ids, 30)
            assert output.status == RequestStatus.FINISHED
            assert 0 < output.created_time <= output.lifespan[0] <= output.lifespan[1]

    def test_samples_with_a_seed_are_those_of_generate(self) -> None:
        config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.9, max_new_tokens=12)
        results = model().generate_batch(PROMPTS, config, seed=7)
        for index, (ids, output) in enumerate(zip(PROMPTS, results.values(), strict=True)):
            assert output.generated_tokens == alone(ids, 12, 7 + index, temperature=0.7, top_p=0.9)

    def test_without_a_seed_samples_differ_from_call_to_call(self) -> None:
        first, second = (
            model().generate_batch([[1, 2, 3]], max_new_tokens=30, do_sample=True)["req_0"] for _ in range(2)
        )
        assert first.generated_tokens != second.generated_tokens

    def test_the_seed_of_the_configuration_makes_samples_repeat(self) -> None:
        results = [
            model().generate_batch(
                PROMPTS[:3], max_new_tokens=9, do_sample=True, continuous_batching_config=small(seed=3)
            )
            for _ in range(2)
        ]
        for first, second in zip(*(each.values() for each in results), strict=True):
            assert first.generated_tokens == second.generated_tokens
        assert len({tuple(each.generated_tokens) for each in results[0].values()}) == 3

    def test_several_continuations_of_one_prompt(self) -> None:
        config = GenerationConfig(do_sample=True, num_return_sequences=3, max_new_tokens=8)
        results = model().generate_batch(PROMPTS[3:5], config, seed=5)
        assert list(results) == [
            f"req_{number}{child}" for number in range(2) for child in ("__child#0", "__child#1", "")
        ]
        for number, ids in enumerate(PROMPTS[3:5]):
            for index, name in enumerate((f"req_{number}__child#0", f"req_{number}__child#1", f"req_{number}")):
                assert results[name].generated_tokens == alone(ids, 8, 5 + number + index)

    def test_logprobs_are_those_of_the_scores(self) -> None:
        output = model().generate_batch(
            PROMPTS[:2], max_new_tokens=6, continuous_batching_config=small(return_logprobs=True)
        )["req_1"]
        ids = torch.tensor([output.prompt_ids + output.generated_tokens])
        with torch.no_grad():
            expected = model()(ids).logits[0, len(output.prompt_ids) - 1 : -1].log_softmax(-1)
        found = expected.gather(1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.logprobs), found, atol=1e-4, rtol=0)

    def test_times_are_recorded_if_wanted(self) -> None:
        config = small()
        output = model().generate_batch(
            [[1, 2]], max_new_tokens=5, record_timestamps=True, continuous_batching_config=config
        )["req_0"]
        assert output.timestamps is not None
        assert len(output.timestamps) == 5
        assert output.timestamps == sorted(output.timestamps)
        assert model().generate_batch([[1]], max_new_tokens=2)["req_0"].timestamps is None

    def test_no_prompts_give_no_results(self) -> None:
        assert model().generate_batch([]) == {}

    def test_a_manager_that_is_kept_serves_the_next_call(self) -> None:
        config = small()
        first = model().generate_batch(
            PROMPTS[:2], max_new_tokens=3, continuous_batching_config=config, persistent_manager=True
        )
        kept = model().init_continuous_batching()
        try:
            with pytest.raises(ValueError, match="other settings is kept"):
                model().generate_batch(PROMPTS[:2], max_new_tokens=3, continuous_batching_config=small(seed=1))
            sampled = GenerationConfig(do_sample=True, max_new_tokens=4)
            second = model().generate_batch(PROMPTS[2:3], sampled, seed=1, persistent_manager=True)
            assert list(second) == ["req_2"]
            assert second["req_2"].generated_tokens == alone(PROMPTS[2], 4, 1)
            assert first["req_1"].generated_tokens == alone(PROMPTS[1], 3)
            assert model().init_continuous_batching() is kept
        finally:
            model().destroy_cached_continuous_batching_manager()
        assert model().init_continuous_batching() is not kept

    @pytest.mark.parametrize(
        ("inputs", "settings", "message"),
        [
            ([[1], []], {}, "empty"),
            ([[1, 97]], {}, "holds 97; it must be a flat list of ids from 0 to 96"),
            ([[1, -1]], {}, "holds -1"),
            ([[1, 2.5]], {}, "holds 2.5"),
            ([[[1]]], {}, r"holds \[1\]"),
            ([[1]], {"max_new_tokens": 0}, "max_new_tokens"),
            ([[1]], {"num_beams": 2}, "asks for beam_search: call generate"),
            ([[1]], {"guidance_scale": 2.0}, "guidance_scale = 2.0"),
            ([[1]], {"prompt_lookup_num_tokens": 2}, "assisted"),
            ([[1]], {"temprature": 2.0}, "temprature: no field"),
            ([[1]], {"do_sample": True, "temperature": -1.0}, "temperature"),
            ([[1]], {"cache_implementation": "paged"}, "cache_implementation = 'paged': rows of blocks"),
            ([[1]], {"stop_strings": ["a"]}, "pass the tokenizer"),
            ([[1] * 20], {"max_new_tokens": None, "max_length": 20}, "the prompt has 20 tokens: allow more"),
        ],
    )
    def test_what_cannot_be_served_is_refused_before_anything_is_generated(
        self, inputs: Any, settings: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            model().generate_batch(inputs, **{"max_new_tokens": 4} | settings)

    def test_texts_that_nothing_would_end_are_refused(self) -> None:
        with pytest.raises(ValueError, match="Nothing would end the texts"):
            model().generate_batch([[1]])


class TestRequests:
    def test_tokens_stream(self) -> None:
        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            name = manager.add_request(PROMPTS[3], max_new_tokens=7, streaming=True)
            other = manager.add_request(PROMPTS[4], max_new_tokens=5)
            results = list(manager.request_id_iter(name))
            (last,) = manager.request_id_iter(other)
        expected = alone(PROMPTS[3], 7)
        assert [each.generated_tokens for each in results] == [expected[:end] for end in range(1, 8)]
        assert [each.status for each in results][-2:] == [RequestStatus.DECODING, RequestStatus.FINISHED]
        assert last.generated_tokens == alone(PROMPTS[4], 5)

    def test_handlers_are_called_in_their_event_loop(self) -> None:
        async def ask(manager: BlockBatchingManager) -> list[GenerationOutput]:
            results: asyncio.Queue[GenerationOutput] = asyncio.Queue()
            manager.register_result_handler("mine", results.put_nowait)
            manager.add_request(PROMPTS[1], "mine", max_new_tokens=3, streaming=True)
            return [await results.get() for _ in range(3)]

        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            results = asyncio.run(ask(manager))
            assert manager.get_result(timeout=0) is None
        assert results[-1].generated_tokens == alone(PROMPTS[1], 3)

    def test_requests_from_many_threads(self) -> None:
        found: dict[str, list[int]] = {}

        def ask(manager: BlockBatchingManager, index: int) -> None:
            name = manager.add_request(PROMPTS[index % len(PROMPTS)], f"thread {index}", max_new_tokens=4 + index)
            result = manager.get_result(name)
            assert result is not None
            found[name] = result.generated_tokens

        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            threads = [threading.Thread(target=ask, args=(manager, index)) for index in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        for index in range(12):
            assert found[f"thread {index}"] == alone(PROMPTS[index % len(PROMPTS)], 4 + index)

    def test_a_cancelled_request_says_so_and_gives_its_row_back(self) -> None:
        with model().continuous_batching_context_manager(
            continuous_batching_config=small(max_requests_per_batch=1)
        ) as manager:
            endless = manager.add_request(PROMPTS[2], streaming=True)
            waiting = manager.add_request(PROMPTS[1], max_new_tokens=4)
            dropped = manager.add_request(PROMPTS[0], max_new_tokens=4)
            for _ in range(20):
                manager.get_result(endless)
            manager.cancel_request(dropped)
            manager.cancel_request(endless)
            manager.cancel_request("nobody")
            result = manager.get_result(waiting)
            *_, last = manager.request_id_iter(endless)
            gone = manager.get_result(dropped)
        assert result is not None
        assert result.generated_tokens == alone(PROMPTS[1], 4)
        assert (last.status, last.error) == (RequestStatus.FAILED, "The request was cancelled.")
        assert len(last.generated_tokens) >= 20
        assert last.generated_tokens == alone(PROMPTS[2], len(last.generated_tokens))
        assert gone is not None
        assert (gone.generated_tokens, gone.error) == ([], "The request was cancelled.")

    def test_stop_strings_end_a_text_as_in_generate(self) -> None:
        letters = {chr(32 + index): index for index in range(97)}
        characters = Tokenizer(models.BPE(letters, []))
        characters.decoder = decoders.Fuse()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters)
        stop = tokenizer.decode(alone(PROMPTS[3], 12)[7:9])
        expected = alone(PROMPTS[3], 30, stop_strings=[stop], tokenizer=tokenizer)
        assert len(expected) < 30
        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            name = manager.add_request(PROMPTS[3], max_new_tokens=30, stop_strings=[stop], tokenizer=tokenizer)
            result = manager.get_result(name)
        assert result is not None
        assert result.generated_tokens == expected

    def test_each_request_has_its_own_settings(self) -> None:
        with model().continuous_batching_context_manager(GenerationConfig(max_new_tokens=9)) as manager:
            manager.add_request(PROMPTS[3], "greedy")
            manager.add_request(PROMPTS[3], "hot", do_sample=True, temperature=2.0, seed=1)
            manager.add_request(PROMPTS[3], "cold", do_sample=True, temperature=0.2, seed=1)
            manager.add_request(PROMPTS[3], "own", generation_config=GenerationConfig(max_new_tokens=2))
            results = {name: manager.get_result(name).generated_tokens for name in ("greedy", "hot", "cold", "own")}
        assert results["greedy"] == alone(PROMPTS[3], 9)
        assert results["hot"] == alone(PROMPTS[3], 9, 1, temperature=2.0)
        assert results["cold"] == alone(PROMPTS[3], 9, 1, temperature=0.2)
        assert results["own"] == alone(PROMPTS[3], 2)

    def test_two_requests_of_one_name_are_refused(self) -> None:
        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            manager.add_request([1], "same")
            with pytest.raises(ValueError, match="'same' has not ended"):
                manager.add_request([1], "same", max_new_tokens=2)
            manager.cancel_request("same")
            assert manager.get_result("same").error is not None
            manager.add_request([1], "same", max_new_tokens=2)
            assert manager.get_result("same").error is None

    def test_a_full_queue_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("lex_hf.inference.batching.manager._PATIENCE", 0.01)
        config = small(max_requests_per_batch=1, max_queue_size=2)
        with model().continuous_batching_context_manager(continuous_batching_config=config) as manager:
            manager.add_request([1], "running", streaming=True)
            manager.get_result("running")
            manager.add_request([1], max_new_tokens=2)
            manager.add_request([1], max_new_tokens=2)
            with pytest.raises(queue.Full, match="2 requests are waiting"):
                manager.add_request([1], "late", max_new_tokens=2)
            assert manager.counts()["waiting"] == 2
            manager.cancel_request("running")
            manager.get_result("req_0")
            manager.add_request([1], "late", max_new_tokens=2)
            assert manager.get_result("late").error is None


class TestRunning:
    def test_stopping_lets_requests_end(self) -> None:
        manager = model().init_continuous_batching(continuous_batching_config=small())
        manager.start()
        names = manager.add_requests(PROMPTS, max_new_tokens=6)
        manager.stop()
        assert not manager.is_running()
        assert all(manager.get_result(name).error is None for name in names)
        with pytest.raises(RuntimeError, match="stopping"):
            manager.add_request([1], max_new_tokens=1)
        assert manager.get_result() is None
        manager.start()
        name = manager.add_request(PROMPTS[1], max_new_tokens=6)
        assert manager.get_result(name).generated_tokens == alone(PROMPTS[1], 6)
        manager.destroy()

    def test_leaving_a_block_without_waiting_lets_requests_go_on(self) -> None:
        with model().continuous_batching_context_manager(continuous_batching_config=small(), block=False) as manager:
            name = manager.add_request(PROMPTS[3], max_new_tokens=40)
        result = manager.get_result(name)
        assert result is not None
        assert result.generated_tokens == alone(PROMPTS[3], 40)
        manager.destroy()

    def test_stopping_at_once_ends_requests_with_an_error(self) -> None:
        manager = model().init_continuous_batching(continuous_batching_config=small())
        manager.start()
        names = [manager.add_request(ids) for ids in PROMPTS]
        manager.stop(hard_stop=True)
        for name in names:
            assert "stopped before" in manager.get_result(name).error
        manager.destroy()
        manager.destroy()

    def test_a_pause_holds_requests_between_two_steps(self) -> None:
        with model().continuous_batching_context_manager(continuous_batching_config=small()) as manager:
            manager.add_request([1], "held", streaming=True)
            manager.get_result("held")
            with manager.pause():
                steps = manager.counts()["steps"]
                with pytest.raises(RuntimeError, match=r"Leave pause\(\)"):
                    manager.stop()
                while manager.get_result(timeout=0.02) is not None:
                    pass
                assert manager.counts()["steps"] == steps
            assert manager.get_result("held", timeout=30) is not None
            manager.cancel_request("held")
        with pytest.raises(RuntimeError, match="does not run"), manager.pause():
            pass

    def test_a_step_that_fails_ends_all_requests_with_its_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        failing = copy.deepcopy(model())
        manager = failing.init_continuous_batching(continuous_batching_config=small())
        manager.start()
        names = [manager.add_request(ids, streaming=True) for ids in PROMPTS]
        manager.get_result(names[0])

        def fail(*args: Any) -> None:
            raise MemoryError("no memory")

        with manager.pause():
            failing.model.norm.register_forward_hook(fail)
        for name in names:
            *_, last = manager.request_id_iter(name)
            assert last.status == RequestStatus.FAILED
            assert "no memory" in last.error
        with pytest.raises(RuntimeError, match="Generation has failed"):
            manager.add_request([1])
        assert isinstance(manager.fatal_error, MemoryError)
        manager.destroy()

    def test_steps_are_compiled_for_a_few_numbers_of_rows(self) -> None:
        compiled = tiny_model()
        shapes = []

        def compile_call(config: Any) -> Any:
            assert config.dynamic is False

            def call(**inputs: Any) -> Any:
                shapes.append(tuple(inputs["input_ids"].shape))
                return compiled(**inputs)

            return call

        compiled.get_compiled_call = compile_call
        results = compiled.generate_batch(
            PROMPTS,
            max_new_tokens=9,
            continuous_batching_config=small(max_requests_per_batch=6, default_compile_level=1),
        )
        assert set(shapes) <= {(1, 1), (2, 1), (4, 1), (6, 1)}
        assert {(1, 1), (2, 1), (4, 1), (6, 1)} <= set(shapes[:4])
        for ids, output in zip(PROMPTS, results.values(), strict=True):
            assert output.generated_tokens == alone(ids, 9)


class TestLimits:
    def test_rows_are_as_many_as_memory_allows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = model().init_continuous_batching(continuous_batching_config=small()).rows.row_bytes
        config = model().config
        per_token = 2 * config.num_hidden_layers * config.hidden_size * 4
        assert per_token * config.training_length <= one <= per_token * config.training_length + 1000
        monkeypatch.setattr("lex_hf.inference.batching.limits.free_memory", lambda device: 5 * one)
        free = ContinuousBatchingConfig(max_memory_percent=1.0)
        assert model().init_continuous_batching(continuous_batching_config=free).rows.size == 5
        assert model().init_continuous_batching().rows.size == 4
        hinted = model().init_continuous_batching(workload_hints=WorkloadHints(num_requests=2))
        assert hinted.rows.size == 2
        with pytest.raises(ValueError, match=r"A row takes .* may be used"):
            model().init_continuous_batching(
                continuous_batching_config=ContinuousBatchingConfig(max_memory_percent=0.1)
            )

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"num_blocks": 4}, "num_blocks = 4 belongs to paged caches"),
            ({"page_size": 32}, "page_size = 32"),
            ({"use_cuda_graph": True}, "use_cuda_graph = True"),
            ({"cpu_offload_space": 1.0}, "cpu_offload_space"),
            ({"scheduler_type": "random"}, "there are fifo, prefill_first"),
            ({"max_requests_per_batch": 0}, "max_requests_per_batch = 0"),
            ({"max_batch_tokens": -1}, "max_batch_tokens = -1"),
            ({"max_memory_percent": 1.5}, "max_memory_percent = 1.5"),
        ],
    )
    def test_settings_that_mean_nothing_here_are_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            model().init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(**fields))

    def test_settings_that_hold_anyway_are_taken(self) -> None:
        config = small(allow_block_sharing=False, use_async_batching=False, use_cuda_graph=False)
        assert model().generate_batch([[1]], max_new_tokens=2, continuous_batching_config=config)

    def test_full_attention_must_know_how_long_texts_become(self) -> None:
        full = tiny_model(**PATTERNS[5])
        with pytest.raises(ValueError, match="workload_hints"):
            full.init_continuous_batching()
        manager = full.init_continuous_batching(
            workload_hints=WorkloadHints(max_prompt_length=20, max_generated_length=10)
        )
        with pytest.raises(ValueError, match=r"for 25 tokens and 6 new ones, .* room for 30"):
            manager.add_request([1] * 25, max_new_tokens=6)
        with pytest.raises(ValueError, match="any number new ones"):
            manager.add_request([1] * 25)
        results = full.generate_batch(PROMPTS, max_new_tokens=5)
        for ids, output in zip(PROMPTS, results.values(), strict=True):
            expected = full.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
            assert output.generated_tokens == expected[0, len(ids) :].tolist()

    def test_sessions_need_a_number_of_bytes(self) -> None:
        with pytest.raises(ValueError, match="session_bytes = -1"):
            model().init_continuous_batching(session_bytes=-1)
        with pytest.raises(ValueError, match="needs session_bytes"):
            model().init_continuous_batching(session_folder="somewhere")


class TestOtherModels:
    def served(self) -> PreTrainedModel:
        return blockwise(rope_model())

    def test_a_model_that_was_made_blockwise(self) -> None:
        llama = self.served()
        results = llama.generate_batch([[5] * 3, [7] * 20], max_new_tokens=12)
        for ids, output in zip(([5] * 3, [7] * 20), results.values(), strict=True):
            expected = llama.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
            assert output.generated_tokens == expected[0, len(ids) :].tolist()

    def test_restoring_gives_transformers_own_way_back(self) -> None:
        llama = restore(self.served())
        assert llama.init_continuous_batching.__func__ is type(llama).init_continuous_batching

    def test_a_copy_serves_itself(self) -> None:
        llama = self.served()
        other = copy.deepcopy(llama)
        with torch.no_grad():
            other.lm_head.weight.neg_()
        result = other.generate_batch([[5] * 9], max_new_tokens=8)["req_0"]
        expected = other.generate(torch.tensor([[5] * 9]), max_new_tokens=8, do_sample=False)
        assert result.generated_tokens == expected[0, 9:].tolist()

    def test_layers_with_other_caches_are_refused(self) -> None:
        mixed = blockwise(
            rope_model(
                "gemma2",
                sliding_window=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_hidden_layers=4,
            )
        )
        with pytest.raises(ValueError, match="Layer, for windows or recurrences: call generate"):
            mixed.init_continuous_batching()

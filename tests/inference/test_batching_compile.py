"""Steps of a running batch under a compiler: one graph for each number of rows, and none after the warm-up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.models import needs_whole_graphs, random_ids, tiny_model
from helpers.rope_models import rope_model
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lex_hf import blockwise

pytestmark = [needs_whole_graphs, pytest.mark.usefixtures("fresh_compiler")]


@pytest.mark.parametrize(
    "make", [lambda: tiny_model(num_hidden_layers=1), lambda: blockwise(rope_model(num_hidden_layers=1))]
)
def test_steps_of_each_number_of_rows_are_one_graph(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    prompts = [random_ids(1, n, seed=n, vocab_size=60)[0].tolist() for n in (2, 9, 17, 5)]
    config: Any = ContinuousBatchingConfig(
        max_requests_per_batch=3, decode_compile_config=CompileConfig(backend="eager", fullgraph=True, dynamic=False)
    )
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.warmup()
    graphs = counters["stats"]["unique_graphs"]
    assert graphs == 3  # of 1, 2 and 3 rows
    manager.start()
    names = [manager.add_request(ids, max_new_tokens=20 + 3 * index) for index, ids in enumerate(prompts)]
    results = [manager.get_result(name) for name in names]
    manager.destroy()
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    for index, (ids, result) in enumerate(zip(prompts, results, strict=True)):
        expected = model.generate(torch.tensor([ids]), max_new_tokens=20 + 3 * index, do_sample=False)
        assert result is not None
        assert result.generated_tokens == expected[0, len(ids) :].tolist()

"""One text, several processes: the logits of one process that reads all of it."""

import itertools
import textwrap
from pathlib import Path

import pytest
import torch
from helpers.forks import PACKAGE
from helpers.models import random_ids, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from lex_hf.inference.context_parallel import part_of, read_part

TEXTS = (
    ({}, 52),
    ({"position_embedding_type": "alibi"}, 21),  # one block for each
    ({"attention_pattern": ["sliding", "blockwise"], "position_embedding_type": "sinusoidal"}, 60),
    ({}, 3600),  # so long that one process reads it in chunks
)

WORKER = """
import sys
import torch
import torch.distributed as dist
from lex_hf import LexForCausalLM
from lex_hf.inference.context_parallel import read_part

torch.set_num_threads(1)
dist.init_process_group("gloo")
for folder in sys.argv[1:]:
    model = LexForCausalLM.from_pretrained(f"{folder}/model")
    text, more = torch.load(f"{folder}/text.pt", weights_only=True)
    output, (start, stop) = read_part(model, text)
    result = {"logits": output.logits, "part": torch.tensor([start, stop])}
    if stop == text.shape[1]:
        with torch.no_grad():
            result["more"] = model(more, past_key_values=output.past_key_values).logits
    torch.save(result, f"{folder}/{dist.get_rank()}.pt")
dist.destroy_process_group()
"""


@pytest.mark.processes
def test_three_processes_read_what_one_reads(tmp_path: Path) -> None:
    """They read all texts in turn: to start them takes longer than to read."""
    cases = []
    for number, (fields, tokens) in enumerate(TEXTS):
        model, text, more = tiny_model(dtype=torch.float64, **fields), random_ids(2, tokens), random_ids(2, 9, seed=4)
        folder = tmp_path / str(number)
        model.save_pretrained(folder / "model")
        torch.save([text, more], folder / "text.pt")
        cases.append((folder, model, torch.cat((text, more), dim=1)))
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))
    result = PACKAGE.run_together(3, tmp_path / "worker.py", *(folder for folder, *_ in cases))
    assert result.returncode == 0, result.stderr
    for folder, model, ids in cases:
        parts = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(3)]
        assert [part["part"][0].item() for part in parts[1:]] == [part["part"][1].item() for part in parts[:-1]]
        with torch.no_grad():
            expected = model(ids).logits
        together = torch.cat([part["logits"] for part in parts] + [parts[-1]["more"]], dim=1)
        torch.testing.assert_close(together, expected, atol=1e-9, rtol=0)


@given(st.integers(1, 50), st.integers(1, 8), st.integers(0, 6), st.integers(0, 6))
def test_parts_are_whole_blocks_and_cover_the_text(block: int, size: int, extra: int, rest: int) -> None:
    tokens = (size + extra) * block + min(rest, block - 1)
    parts = [part_of(tokens, block, rank, size) for rank in range(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == tokens
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(parts))
    assert all(start % block == 0 and stop - start >= block for start, stop in parts)


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="20 tokens are 2 blocks of 7, too few for 3 processes"):
        part_of(20, 7, 0, 3)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="Layers with full attention need the keys of the whole text"):
            read_part(tiny_model(attention_pattern="full"), random_ids(1, 20))
        with torch.no_grad():
            model, ids = tiny_model(), random_ids(1, 30)
            assert torch.equal(read_part(model, ids)[0].logits, model(ids).logits)
    finally:
        torch.distributed.destroy_process_group()

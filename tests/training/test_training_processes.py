"""Training in two processes, and models that they share out."""

import inspect
import json
from pathlib import Path

import pytest
import torch
from helpers.forks import PACKAGE
from helpers.trainings import LENGTH, examples, tiny_lex, train_tiny
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from typer.testing import CliRunner

from lex_hf import LexForCausalLM
from lex_hf.cli.commands import app

SHARDED = """
import sys
import lex_hf
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

torch.distributed.init_process_group("gloo")
ids = torch.arange(60).view(2, 30) % 257
plain = AutoModelForCausalLM.from_pretrained(sys.argv[1])
expected = plain(ids, labels=ids, use_cache=False).loss
expected.backward()

by_hand = AutoModelForCausalLM.from_pretrained(sys.argv[1])
mesh = init_device_mesh("cpu", (2,))
for layer in by_hand.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(by_hand, mesh=mesh)
loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(fsdp_size=2))
for model in (by_hand, loaded):
    loss = model.train()(ids, labels=ids, use_cache=False).loss
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=0)
    loss.backward()
    sharded = 0
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        sharded += isinstance(one, DTensor) and one.to_local().numel() < one.numel()
        gradient = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        torch.testing.assert_close(gradient, other.grad, atol=1e-5, rtol=0, msg=name)
    assert sharded > 20, sharded
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert model(ids, labels=ids, use_cache=False).loss < loss
torch.distributed.destroy_process_group()
"""


IN_TURN = """
import sys
from lex_hf.cli.commands import app

for streaming in ("false", "true"):
    output = f"{sys.argv[1]}-{streaming}"
    app([*sys.argv[2:], "--set", f"streaming={streaming}", "--output", output], standalone_mode=False)
"""


class TestTwoProcesses:
    @pytest.mark.processes
    def test_train_what_one_does(self, tmp_path: Path, corpus: list[Path]) -> None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        numbers = {"training_length": LENGTH, "max_steps": 5, "save_steps": 3, "warmup_steps": 0, "shuffle_buffer": 5}
        batches = {"per_device_train_batch_size": 2, "examples_per_step": 4, "separate_documents": "true"}
        fields = {**sizes, **numbers, **batches, "use_cpu": "true"}
        options = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
        command = ["train", "tiny", "--data", str(corpus[0]), *options]
        script = tmp_path / "script.py"
        script.write_text(IN_TURN)
        process = PACKAGE.run_together(2, script, tmp_path / "both", *command)
        assert process.returncode == 0, process.stderr
        for streaming in ("false", "true"):
            alone = tmp_path / f"alone-{streaming}"
            result = CliRunner().invoke(app, [*command, "--set", f"streaming={streaming}", "--output", str(alone)])
            assert result.exit_code == 0, result.output
            self.assert_trained_alike(tmp_path / f"both-{streaming}", alone)

    def assert_trained_alike(self, both: Path, alone: Path) -> None:
        states = [json.loads((path / "checkpoint-5" / "trainer_state.json").read_text()) for path in (both, alone)]
        assert states[0]["num_input_tokens_seen"] == states[1]["num_input_tokens_seen"] == 5 * 4 * LENGTH
        one, other = (AutoModelForCausalLM.from_pretrained(path) for path in (both, alone))
        for name, weight in one.state_dict().items():
            torch.testing.assert_close(weight, other.state_dict()[name], atol=2e-5, rtol=0, msg=name)
        started = LexForCausalLM(one.config)
        assert not torch.allclose(started.lm_head.weight, one.lm_head.weight, atol=1e-3)

    @pytest.mark.processes
    @pytest.mark.skipif(
        "fsdp_size" not in inspect.signature(DistributedConfig).parameters, reason="transformers 5.9 cannot load so"
    )
    def test_share_out_a_model(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(SHARDED)
        tiny_lex(initializer_range=0.2).save_pretrained(tmp_path / "model")
        process = PACKAGE.run_together(2, script, tmp_path / "model")
        assert process.returncode == 0, process.stderr

    @pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
    def test_sharding_is_not_left_out_in_silence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        with pytest.raises(ValueError, match="FSDP was requested, and there is no accelerator here"):
            train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1)

"""Clients that are packages of their own, each tested where it is installed: PEFT, TRL, torchao, `lex-hf serve`.

`pip install '.[clients,serve]'` installs them all.
"""

import contextlib
import copy
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.models import random_ids, tiny_model
from helpers.rope_models import rope_model
from helpers.serving import COMPLETIONS, chat_tokenizer, letter_model, needs_server, running
from transformers import AutoModelForCausalLM, TorchAoConfig
from typer.testing import CliRunner

from lex_hf import LexForCausalLM, PackedWeightsConfig, blockwise
from lex_hf.cli.commands import app as commands
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference.packed_weights import pack_weights

# PEFT and TRL call checkpointing by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")

BYTES = {"vocab_size": 257, "bos_token_id": 256, "pad_token_id": 256}


def logits_of(model: Any, length: int = 40) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, length)).logits


def tokens_of(model: Any) -> torch.Tensor:
    return model.generate(random_ids(2, 20), max_new_tokens=25, do_sample=False)


class TestPeft:
    @pytest.fixture
    def peft(self) -> ModuleType:
        return pytest.importorskip("peft")

    @pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_lora(self, peft: ModuleType, targets: Any, checkpointing: bool, tmp_path: Path) -> None:
        tiny_model().save_pretrained(tmp_path / "base")
        model = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=3),
        )
        before, base = (
            logits_of(model),
            {name: p.clone() for name, p in model.named_parameters() if "lora" not in name},
        )
        assert torch.equal(before, logits_of(tiny_model()))
        adapted = {name.rpartition(".lora_A")[0].rpartition(".")[2] for name in model.state_dict() if "lora_A" in name}
        assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"} or adapted == {*targets}

        if checkpointing:
            model.activation_checkpointing_enable()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids = random_ids(2, 40)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        assert all(torch.equal(p, base[name]) for name, p in model.named_parameters() if name in base)
        trained = logits_of(model.eval())
        assert (trained - before).abs().max() > 0.01

        model.save_pretrained(tmp_path / "adapter")
        reloaded = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        )
        assert torch.equal(logits_of(reloaded), trained)
        automatic = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
        assert isinstance(automatic, LexForCausalLM)
        assert torch.equal(logits_of(automatic), trained)
        merged = reloaded.merge_and_unload()
        assert isinstance(merged, LexForCausalLM)
        torch.testing.assert_close(logits_of(merged), trained, atol=1e-4, rtol=0)
        assert torch.equal(tokens_of(merged), tokens_of(model))
        merged.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(logits_of(loaded), logits_of(merged))

    @pytest.mark.parametrize("sinks", [0, 1])
    @pytest.mark.parametrize("is_first", [False, True])
    def test_lora_in_blocks(self, peft: ModuleType, is_first: bool, sinks: int, tmp_path: Path) -> None:
        """A Llama that reads in blocks, before the adapter comes or after it; the adapter fits the plain one."""
        config, ids = (
            peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=3),
            random_ids(2, 40),
        )
        base = rope_model(seed=1, vocab_size=97)
        expected = logits_of(blockwise(copy.deepcopy(base), sinks=sinks))
        model = peft.get_peft_model(blockwise(base, sinks=sinks) if is_first else base, config)
        if not is_first:
            blockwise(model.get_base_model(), sinks=sinks)
        assert torch.equal(logits_of(model), expected)
        model.train()
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses == sorted(losses, reverse=True)
        trained, plain = logits_of(model.eval()), rope_model(seed=1, vocab_size=97)
        assert (trained - expected).abs().max() > 0.01
        model.save_pretrained(tmp_path)
        reloaded = peft.PeftModel.from_pretrained(plain, tmp_path)
        blockwise(reloaded.get_base_model(), sinks=sinks)
        assert torch.equal(logits_of(reloaded), trained)
        merged = reloaded.merge_and_unload()
        torch.testing.assert_close(logits_of(merged), trained, atol=1e-4, rtol=0)


class TestTrl:
    TEXTS = ("In a hole in the ground", "né", "There lived a test; it had failed once.", "na " * 30)

    @pytest.fixture
    def trl(self) -> ModuleType:
        return pytest.importorskip("trl")

    def sft(self, trl: ModuleType, model: Any, folder: Path, **options: Any) -> Any:
        """A trainer that takes one step with all texts."""
        arguments = trl.SFTConfig(
            str(folder / "output"),
            max_steps=1,
            per_device_train_batch_size=len(self.TEXTS),
            learning_rate=0.5,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            max_length=128,
            bf16=False,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            **options,
        )
        dataset = Dataset.from_dict({"text": list(self.TEXTS)})
        return trl.SFTTrainer(model, arguments, train_dataset=dataset, processing_class=byte_tokenizer())

    def step_by_hand(self, model: LexForCausalLM) -> float:
        """Take the step on documents that are read one by one; return their loss."""
        documents = [torch.tensor([[*text.encode(), 256]]) for text in self.TEXTS]
        sizes = [ids.shape[1] - 1 for ids in documents]
        losses = [model(ids, labels=ids, use_cache=False).loss for ids in documents]
        loss = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.5 * parameter.grad
        return loss.item()

    @pytest.mark.parametrize("packing", [False, True])
    @pytest.mark.parametrize("given", ["path", "model"])
    def test_sft_takes_the_step_of_the_single_documents(
        self, trl: ModuleType, given: str, packing: bool, tmp_path: Path
    ) -> None:
        model = tiny_model(**BYTES, eos_token_id=256)
        model.save_pretrained(tmp_path / "model")
        by_hand = copy.deepcopy(model)
        expected = self.step_by_hand(by_hand)
        trainer = self.sft(trl, str(tmp_path / "model") if given == "path" else model, tmp_path, packing=packing)
        (batch,) = trainer.get_train_dataloader()
        tokens = sum(len(text.encode()) + 1 for text in self.TEXTS)
        assert (batch["input_ids"].numel() == tokens) is packing  # no padding
        assert ("position_ids" in batch) is packing
        assert trainer.train().training_loss == pytest.approx(expected, abs=1e-5)
        for (name, trained), parameter in zip(
            trainer.model.named_parameters(), by_hand.named_parameters(), strict=True
        ):
            torch.testing.assert_close(trained, parameter[1], atol=1e-5, rtol=0, msg=name)


class TestTorchao:
    @pytest.fixture
    def quantization(self) -> ModuleType:
        pytest.importorskip("torchao")
        return pytest.importorskip("torchao.quantization")

    @pytest.mark.parametrize(("bits", "error"), [(8, 0.05), (4, 0.5)])
    def test_weight_only(self, quantization: ModuleType, bits: int, error: float, tmp_path: Path) -> None:
        if bits == 8:
            scheme = quantization.Int8WeightOnlyConfig()
        else:  # torchao's Int4WeightOnlyConfig has no kernels for CPUs
            scheme = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32))
        model = tiny_model(hidden_size=64, num_attention_heads=2, intermediate_size=96)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 0.3 if parameter.dim() > 1 else 1.0
        model.save_pretrained(tmp_path / "model")
        quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=TorchAoConfig(scheme))
        logits = logits_of(quantised)
        assert 0 < (logits - logits_of(model)).std() / logits.std() < error

        # It computes what the model with the rounded weights does: those of the 6 matrices of a layer.
        rounded = {
            name: weight.dequantize()
            for name, weight in quantised.named_parameters()
            if type(weight.data) is not torch.Tensor
        }
        assert len(rounded) == 2 * 6
        model.load_state_dict(rounded, strict=False)
        torch.testing.assert_close(logits, logits_of(model), atol=1e-4, rtol=0)
        assert torch.equal(tokens_of(quantised), tokens_of(model))

        quantised.save_pretrained(tmp_path / "quantised")
        sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("quantised", "model")]
        assert sizes[0] < 0.6 * sizes[1]
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "quantised")
        assert torch.equal(logits_of(loaded), logits)


QUESTION = "Is there a test?"
PROMPT = f"user: {QUESTION}\nassistant: "


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except urllib.error.URLError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server of the model in `folder` at `url`, in a home where nothing was ever downloaded."""
    needs_server()
    place = tmp_path_factory.mktemp("server")
    folder = place / "model"
    letter_model().save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    with serving(place) as url:
        yield SimpleNamespace(url=url, folder=folder, model=letter_model())


@contextlib.contextmanager
def serving(place: Path) -> Iterator[str]:
    """Serve the model in `place / "model"`; yield the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    command = [sys.executable, "-m", "lex_hf", "serve", place / "model", *where]
    environment = {**os.environ, "HF_HOME": str(place / "home"), "HF_HUB_OFFLINE": "1"}
    with (place / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert process.poll() is None, (place / "log").read_text()
            time.sleep(0.2)
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()


class TestServe:
    @pytest.fixture
    def client(self, server: SimpleNamespace) -> Any:
        openai = pytest.importorskip("openai")
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            yield client

    def expected(self, server: SimpleNamespace, text: str, tokens: int) -> str:
        """What the model itself generates."""
        words = byte_tokenizer()
        inputs = words(text, return_tensors="pt")
        output = server.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return words.decode(output[0, inputs["input_ids"].shape[1] :])

    def test_chat(self, server: SimpleNamespace, client: Any) -> None:
        expected = self.expected(server, PROMPT, 40)
        assert expected.isalpha()
        assert len(set(expected)) > 3
        request = {"model": str(server.folder), "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40}
        answer = client.chat.completions.create(**request)
        assert answer.choices[0].message.content == expected
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 40)
        assert answer.choices[0].finish_reason == "length"
        pieces = [chunk.choices[0].delta.content for chunk in client.chat.completions.create(**request, stream=True)]
        assert "".join(piece or "" for piece in pieces) == expected
        assert len(pieces) > 10

    def test_completions(self, server: SimpleNamespace, client: Any) -> None:
        expected = self.expected(server, "In a hole", 40)
        request = {"model": str(server.folder), "prompt": "In a hole", "max_tokens": 40}
        assert client.completions.create(**request).choices[0].text == expected
        stream = client.completions.create(**request, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected

    def test_a_llama_in_blocks(self, tmp_path: Path) -> None:
        special = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
        llama = rope_model(attention="sdpa", **special)
        answer = self.answer(llama, tmp_path, "--blockwise", "auto")
        assert answer == self.expected(SimpleNamespace(model=blockwise(llama)), "In a hole", 40)

    def answer(self, model: Any, folder: Path, *options: str) -> str:
        """Let what the command serves with these options, in this process, continue a text."""
        needs_server()
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        with pytest.MonkeyPatch.context() as patch:
            served: list[Any] = []
            patch.setattr("lex_hf.inference.serving.server.run", lambda app, *settings: served.append(app))
            result = CliRunner().invoke(commands, ["serve", str(folder), "--device", "cpu", *options])
        assert result.exit_code == 0, result.output
        with running(served[0]) as server:
            status, answer = server.ask(COMPLETIONS, {"prompt": "In a hole", "max_tokens": 40, "temperature": 0})
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def test_packed_weights(self, tmp_path: Path) -> None:
        answer = self.answer(letter_model(), tmp_path, "--weights", "int4")
        packed = pack_weights(letter_model(), PackedWeightsConfig(4))
        assert answer == self.expected(SimpleNamespace(model=packed), "In a hole", 40)
        assert answer != self.expected(SimpleNamespace(model=letter_model()), "In a hole", 40)

    def test_models(self, server: SimpleNamespace, client: Any) -> None:
        assert [model.id for model in client.models.list()] == [str(server.folder)]

    def test_transformers_chat(self, server: SimpleNamespace, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "transformers.cli.transformers", "chat", server.folder, server.url]
        options = ["max_new_tokens=30", "do_sample=False"]
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        environment |= {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HOME": str(tmp_path / "home")}
        result = subprocess.run(
            [*command, *options],
            input=f"{QUESTION}\nno\n!exit\n",  # no: the answer need not go on
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert self.expected(server, PROMPT, 30) in result.stdout
        assert "Generation stopped after reaching the token limit" in result.stdout

"""Peak memory of one task in a process of its own, where nothing that went before it counts."""

import json
import os
import random
import resource
import string
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from interleave import timed
from record import Peak
from settings import Settings
from systems import OWN, SYSTEMS, lex_config, new_cache, random_model, why_not
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.evaluation.perplexity import compute_perplexity

# glibc then gives every large block back when it is freed. What would stay in its heap differs by a twentieth from one
# run to the next of the same task.
_EXACT = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def in_a_process(settings: Settings, task: str, system: str, lengths: Sequence[int]) -> list[Peak]:
    """Do a task in a new process and return its memory at each length.

    Args:
        settings: Settings.
        task: As in [`Peak`].
        system: Name of the system.
        lengths: Tokens, ascending: what a process has had at its most only grows.

    Raises:
        RuntimeError: If the process fails.
    """
    order = {"settings": asdict(settings), "task": task, "system": system, "lengths": list(lengths)}
    finished = subprocess.run(
        [sys.executable, str(Path(__file__)), json.dumps(order)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | _EXACT,
    )
    if finished.returncode:
        raise RuntimeError(f"Measuring the memory of {task} with {system} failed:\n{finished.stderr[-2000:]}")
    return [Peak(**each) for each in json.loads(finished.stdout.splitlines()[-1])]


def peaks(settings: Settings, task: str, system: str, lengths: Sequence[int]) -> list[Peak]:
    """Do a task at each length in this process; see [`in_a_process`]."""
    model = _model(settings, task, system)
    built, found, seconds = _memory_now(settings), [], dict[int, float]()
    for length in lengths:
        reason = None if system in OWN else why_not(settings, SYSTEMS[system], length, seconds)
        if reason is None:
            if settings.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds[length] = timed(TASKS[task](settings, model, length), settings.device)
        most = 0 if reason else max(built, _most_memory(settings))
        found.append(Peak(task, system, length, built, most, seconds.get(length, 0.0), reason))
    return found


def training_step(model: Any, inputs: Tensor, direction: Tensor) -> None:
    """Run a model forwards and backwards.

    Args:
        model: A model without a head.
        inputs: Embeddings, shape `(batch, sequence, hidden_size)`.
        direction: What the outputs are multiplied with for a loss whose gradient is the same for every system.
    """
    model.zero_grad(set_to_none=True)
    output = model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    (output * direction).sum().backward()


def _model(settings: Settings, task: str, system: str) -> nn.Module:
    if task == "streaming":
        return random_model(settings, lex_config(settings), AutoModelForCausalLM)
    model: Any = SYSTEMS[system].build(settings)
    if task == "checkpointed":
        model.activation_checkpointing_enable()
    return model


def _prefill(settings: Settings, model: Any, length: int) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            inputs = random_states(settings, 1, length)
            model(inputs_embeds=inputs, past_key_values=new_cache(model), use_cache=True)

    return call


def _train(settings: Settings, model: Any, length: int) -> Callable[[], object]:
    states = [random_states(settings, settings.training_batch, length) for _ in range(2)]
    return partial(training_step, model.train(), *states)


def _stream(settings: Settings, model: Any, length: int) -> Callable[[], object]:
    text = "".join(random.Random(0).choices(string.ascii_lowercase + " ", k=length))
    return partial(
        compute_perplexity,
        model,
        byte_tokenizer(),
        [text],
        protocol="streaming",
        length=settings.training_length,
        progress=False,
    )


TASKS: dict[str, Callable[[Settings, Any, int], Callable[[], object]]] = {
    "prefill": _prefill,
    "training": _train,
    "checkpointed": _train,
    "streaming": _stream,
}


def random_states(settings: Settings, batch: int, length: int) -> Tensor:
    """Make embeddings, shape `(batch, length, hidden_size)`."""
    return torch.randn(batch, length, settings.hidden_size, device=settings.device, dtype=settings.torch_dtype)


def _memory_now(settings: Settings) -> int:
    return psutil.Process().memory_info().rss if settings.device == "cpu" else torch.cuda.memory_allocated()


def _most_memory(settings: Settings) -> int:
    """Most bytes that this process has had in memory; on a GPU, since the counter was set back."""
    if settings.device == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # getrusage counts what the process had before it became this program: its parent's memory
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    done = peaks(Settings(**order["settings"]), order["task"], order["system"], order["lengths"])
    print(json.dumps([asdict(each) for each in done]))

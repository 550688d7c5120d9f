"""Experiments that are killed and resumed, and experiments on two processes."""

import json
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.experiments import run_experiment
from helpers.forks import PACKAGE
from safetensors.torch import load_file

from lex_hf.reproduce import models
from lex_hf.training.run_folder import last_checkpoint

_KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers import experiments
from lex_hf.training import trainer as training
from lex_hf.reproduce import presets, running
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == step and "seed1" in args.output_dir:
            os.kill(os.getpid(), kill)

build = training._build_trainer
def _build(*arguments):
    trainer = build(*arguments)
    trainer.add_callback(Kill())
    return trainer
training._build_trainer = _build
presets.PRESETS["tiny"] = experiments.toy_preset
codes = []
for name, step in {kills!r}:
    process = os.fork()  # what is killed need not import all of this again
    if not process:
        kill = getattr(signal, name)
        output = Path({output!r}, f"{{name}}-{{step}}")
        running.run(experiments.toy_request("sandwich-figure6", output, {texts!r}, steps=6))
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print("", *codes, sep="\\n")
"""


@pytest.mark.processes
def test_killed_runs_go_on(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    kills, tests = [("SIGKILL", 1), ("SIGKILL", 4), ("SIGINT", 4)], str(Path(__file__).parents[1])
    code = _KILLED.format(tests=tests, kills=kills, output=str(tmp_path), texts=texts)
    process = PACKAGE.run("-c", textwrap.dedent(code))
    assert process.stdout.split()[-3:] == [str(-getattr(signal, name)) for name, _ in kills], process.stderr
    assert process.stderr.count("stopped after 4 of 6 steps. The same command continues") == 1  # of SIGINT
    whole = run_experiment("sandwich-figure6", tmp_path / "whole", texts, steps=6)
    for name, step in kills:
        output = tmp_path / f"{name}-{step}"
        second = next(path for path in (output / "models").iterdir() if "seed1" in path.name)
        assert not (second / models.DONE).exists()
        begun = last_checkpoint(second) is not None
        record = run_experiment("sandwich-figure6", output, texts, steps=6)
        assert [each["trained_now"] for each in record["models"]] == [False, True]
        assert record["models"][1]["resumed"] == begun
        weights = [
            load_file(folder / "models" / second.name / "model.safetensors") for folder in (output, tmp_path / "whole")
        ]
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[1])
        assert record["results"] == whole["results"]


_SHARED_OUT = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers import experiments
from lex_hf.reproduce import presets, running

presets.PRESETS["tiny"] = experiments.toy_preset
running.run(
    experiments.toy_request("lex-figure1", Path({output!r}), {texts!r}, seeds=(0,), tokenizer="bpe:270")
)
"""


@pytest.mark.processes
def test_two_processes_make_the_same_table(tmp_path: Path, toy: None, texts: dict[str, Any]) -> None:
    alone = run_experiment("lex-figure1", tmp_path / "alone", texts, seeds=(0,), tokenizer="bpe:270")
    script, output = tmp_path / "script.py", tmp_path / "two"
    script.write_text(_SHARED_OUT.format(tests=str(Path(__file__).parents[1]), output=str(output), texts=texts))
    for _ in range(2):  # the second time the report is there, and is looked at
        done = PACKAGE.run_together(2, script)
        assert done.returncode == 0, done.stderr
    record = json.loads((output / "lex-figure1-tiny" / "record.json").read_text())
    assert record["hardware"]["processes"] == 2
    assert record["models"][0]["tokens"] == alone["models"][0]["tokens"]
    for system, cells in alone["results"]["books"]["cells"].items():
        ours = record["results"]["books"]["cells"][system]
        for column, cell in cells.items():
            assert ours[column]["values"] == pytest.approx(cell["values"], rel=1e-5)

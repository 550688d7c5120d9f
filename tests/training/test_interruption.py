"""Trainings that are stopped by real signals, and killed."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.forks import PACKAGE
from helpers.trainings import assert_same_weights, examples, on_forward, stream, tiny_lex, train_tiny
from transformers import AutoModelForCausalLM

from lex_hf.training.interruption import TrainingInterrupted
from lex_hf.training.run_folder import last_checkpoint
from lex_hf.training.trainer import TrainingResult


class TestSignals:
    @pytest.fixture(autouse=True)
    def python_answers_to_ctrl_c(self) -> Iterator[None]:
        """Shells start what runs in the background with SIGINT ignored, and Python leaves it so."""
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
        signal.signal(signal.SIGINT, before)

    @pytest.mark.processes
    def test_sigterm_from_another_process(self, tmp_path: Path) -> None:
        script = (
            "from pathlib import Path\n"
            "from helpers.trainings import examples, tiny_lex, train_tiny\n"
            f"train_tiny(Path({str(tmp_path)!r}), tiny_lex(), examples(10), max_steps=10**6, save_steps=10**6,\n"
            "       logging_steps=10**6, logging_first_step=True)\n"
        )
        with PACKAGE.start("-c", script, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
            while "loss" not in process.stdout and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 1
            errors = process.stderr
        checkpoint = last_checkpoint(tmp_path)
        assert checkpoint is not None
        steps = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
        assert f"TrainingInterrupted: Training was interrupted after {steps} of 1000000 steps" in errors
        AutoModelForCausalLM.from_pretrained(checkpoint)

    def test_second_signal_stops_at_once(self, tmp_path: Path) -> None:
        model = tiny_lex()

        def twice() -> None:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGINT)

        on_forward(model, 2, twice)
        with pytest.raises(KeyboardInterrupt) as info:
            train_tiny(tmp_path, model, examples(10), max_steps=5)
        assert not isinstance(info.value, TrainingInterrupted)
        assert last_checkpoint(tmp_path) is None

    def test_signal_in_the_last_step_comes_after_the_model_is_saved(self, tmp_path: Path) -> None:
        model = tiny_lex()
        on_forward(model, 3, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt) as info:
            train_tiny(tmp_path, model, examples(10), max_steps=3)
        assert not isinstance(info.value, TrainingInterrupted)
        assert_same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)

    @pytest.mark.parametrize("strategy", ["steps", "epoch"])
    def test_stop_skips_the_evaluation(self, tmp_path: Path, strategy: str) -> None:
        model = tiny_lex()
        on_forward(model, 2, lambda: signal.raise_signal(signal.SIGINT))
        options = {"max_steps": 9, "eval_strategy": strategy, "eval_steps": 2, "save_strategy": strategy}
        with pytest.raises(TrainingInterrupted):
            train_tiny(tmp_path, model, examples(10), eval_dataset=examples(2), **options)
        state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
        assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 2]
        assert not any("eval_loss" in entry for entry in state["log_history"])

    def test_training_in_another_thread(self, tmp_path: Path) -> None:
        results: list[TrainingResult] = []
        work = threading.Thread(
            target=lambda: results.append(train_tiny(tmp_path, tiny_lex(), examples(4), max_steps=1))
        )
        work.start()
        work.join()
        assert [result.steps for result in results] == [1]


KILLED = """
import os, random, signal, sys
from pathlib import Path
from helpers.trainings import examples, tiny_lex, on_forward, stream, train_tiny

folder, corpus, step = Path(sys.argv[1]), [Path(sys.argv[2])], int(sys.argv[3])
codes = []
for streaming in (False, True):
    process = os.fork()  # what is killed need not import all of this again
    if not process:
        model = tiny_lex(hidden_dropout=0.2)
        on_forward(model, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        data = stream(corpus) if streaming else examples(10)
        train_tiny(folder / str(streaming), model, data, max_steps=12, save_steps=2)
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
print("", *codes, sep="\\n")
"""


class TestKill:
    @pytest.mark.processes
    def test_at_a_random_step_loses_nothing(self, tmp_path: Path, corpus: list[Path]) -> None:
        step = random.SystemRandom().randrange(4, 13)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = PACKAGE.run("-c", KILLED, tmp_path, corpus[0], step, env=environment)
        assert process.stdout.split()[-2:] == [str(-signal.SIGKILL)] * 2, process.stderr
        for streaming in (False, True):
            folder = tmp_path / str(streaming)
            last = last_checkpoint(folder)
            assert last == folder / f"checkpoint-{(step - 1) // 2 * 2}", f"killed in step {step}"
            straight, resumed = tiny_lex(hidden_dropout=0.2), tiny_lex(seed=7, hidden_dropout=0.2)
            data = [stream(corpus) if streaming else examples(10) for _ in range(2)]
            expected = train_tiny(tmp_path / f"straight-{streaming}", straight, data[0], max_steps=12, save_steps=2)
            result = train_tiny(folder, resumed, data[1], max_steps=12, save_steps=2, resume=True)
            assert_same_weights(resumed, straight)
            assert (result.losses, result.tokens) == (expected.losses, expected.tokens), f"killed in step {step}"

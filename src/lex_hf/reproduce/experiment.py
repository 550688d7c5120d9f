"""The engine of all experiments: it trains the models that are missing and measures what was not measured before."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lex_hf.data.packing import pack
from lex_hf.reproduce import models
from lex_hf.reproduce.corpora import Texts
from lex_hf.reproduce.measuring import Measurement, Setting, measure
from lex_hf.reproduce.models import Job

Jobs = Mapping[tuple[str, int], Job]  # by system and seed
Measured = dict[str, list[dict[str, Measurement]]]  # by system, for each seed the measurements by column

_DOES = {"trained": "is there", "begun": "is resumed from its checkpoint", "missing": "is trained"}


class Experiment:
    """Systems of a table, the models they need, and the texts on which they are measured.

    Args:
        setting: The table, its scale, and the device on which models are measured.
        jobs: The model of each system and seed; systems may share one.
        models: Folder of the models.
        training: Texts to train on.
        tests: Sets of texts to measure on.
        report: Called with a line about what is about to be done.
    """

    def __init__(
        self,
        setting: Setting,
        jobs: Jobs,
        *,
        models: Path,
        training: Texts,
        tests: Sequence[Texts],
        report: Callable[[str], None],
    ) -> None:
        self._setting = setting
        self._jobs = jobs
        self._models = models
        self._training = training
        self._tests = tests
        self._report = report
        self._packed: dict[int, Dataset] = {}

    def train(
        self, tokenizer: PreTrainedTokenizerBase, systems: Collection[str] | None = None
    ) -> list[tuple[dict[str, Any], list[str]]]:
        """Train the models that are missing, from their last checkpoint if there is one.

        Args:
            tokenizer: Tokenizer of all models.
            systems: Names of systems; all by default.

        Returns:
            What is recorded of each model, and the systems that it serves.

        Raises:
            KeyboardInterrupt: If training was stopped; the same call resumes it.
        """
        wanted = distinct({key: job for key, job in self._jobs.items() if systems is None or key[0] in systems})
        trained = []
        for number, (job, served) in enumerate(wanted, start=1):
            state = job.state(self._models)
            self._report(f"Model {number} of {len(wanted)}, {job.name}: {_DOES[state]}")
            examples = None if state == "trained" else self._examples(tokenizer, job.config.training_length)
            at_once = self._setting.preset.tokens_at_once
            trained.append((models.ensure(job, self._models, tokenizer, examples, at_once), served))
        return trained

    def measure(self, systems: Collection[str] | None = None) -> dict[str, Measured]:
        """Measure systems whose models are trained.

        Args:
            systems: Names of systems; all by default.

        Returns:
            By name of the test texts.
        """
        results: dict[str, Measured] = {}
        for texts in self._tests:
            for system in self._setting.table.systems:
                if systems is not None and system.name not in systems:
                    continue
                folders = [self._models / job.name for (name, _), job in self._jobs.items() if name == system.name]
                results.setdefault(texts.name, {})[system.name] = [
                    measure(self._setting, system, folder, texts, lambda what: self._report(f"Measuring {what}"))
                    for folder in folders
                ]
        return results

    def _examples(self, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        if length not in self._packed:
            with PartialState().main_process_first():
                self._packed[length] = pack(self._training.documents, tokenizer, length)
        return self._packed[length]


def distinct(jobs: Jobs) -> list[tuple[Job, list[str]]]:
    """Return each model once, with the systems that it serves: those that differ in evaluation only share one."""
    found: dict[str, tuple[Job, list[str]]] = {}
    for (system, _), job in jobs.items():
        found.setdefault(job.name, (job, []))[1].append(system)
    return list(found.values())

"""The engine of all experiments: it trains the models that are missing and measures what was not measured before."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lex_hf.data.packing import pack
from lex_hf.reproduce.corpora import Texts
from lex_hf.reproduce.measuring import Measurement, Setting, measure
from lex_hf.reproduce.models import Job, ensure

Jobs = Mapping[tuple[str, int], Job]  # by system and seed; systems may share one
Measured = dict[str, list[dict[str, Measurement]]]  # by system, for each seed the measurements by column

DOES = {"trained": "is there", "begun": "is resumed from its checkpoint", "missing": "is trained"}


@dataclass
class Experiment:
    """Systems of a table, the models they need, and the texts on which they are measured."""

    setting: Setting
    jobs: Jobs
    models: Path  # folder of the models
    training: Dataset  # texts, in the column `text`
    tests: Sequence[Texts]
    report: Callable[[str], None]  # called with a line about what is about to be done
    _packed: dict[int, Dataset] = field(default_factory=dict, init=False)

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
        wanted = distinct({key: job for key, job in self.jobs.items() if systems is None or key[0] in systems})
        trained = []
        for number, (job, served) in enumerate(wanted, start=1):
            state = job.state(self.models)
            self.report(f"Model {number} of {len(wanted)}, {job.name}: {DOES[state]}")
            examples = None if state == "trained" else self._examples(tokenizer, job.training_length)
            at_once = self.setting.preset.tokens_at_once
            trained.append((ensure(job, self.models, tokenizer, examples, at_once), served))
        return trained

    def measure(self, systems: Collection[str] | None = None) -> dict[str, Measured]:
        """Measure systems whose models are trained, all by default; return the results by name of the test texts."""
        return {texts.name: self._measured(texts, systems) for texts in self.tests}

    def _measured(self, texts: Texts, systems: Collection[str] | None) -> Measured:
        results: Measured = {}
        for system in self.setting.table.systems:
            for (name, _), job in self.jobs.items():
                if name == system.name and (systems is None or name in systems):
                    found = measure(self.setting, system, self.models / job.name, texts, self.report)
                    results.setdefault(name, []).append(found)
        return results

    def _examples(self, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        if length not in self._packed:
            with PartialState().main_process_first():
                self._packed[length] = pack(self.training, tokenizer, length)
        return self._packed[length]


def distinct(jobs: Jobs) -> list[tuple[Job, list[str]]]:
    """Return each model once, with the systems that it serves: those that differ in evaluation only share one."""
    found: dict[str, tuple[Job, list[str]]] = {}
    for (system, _), job in jobs.items():
        found.setdefault(job.name, (job, []))[1].append(system)
    return list(found.values())

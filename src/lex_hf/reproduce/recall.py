"""The study of recall: models trained on texts of length l that ask for recall within l, read at up to 32 l.

For each system: recall by distance, perplexity by length, bytes of the cache, time of prefill and of decoding. The
same systems can be trained on other texts, of which perplexity is measured. Models, recall and perplexity are kept in
the output folder, and never made twice; every run measures costs again.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lex_hf.evaluation.costs import Costs, measure_costs
from lex_hf.evaluation.loading import evaluating, load_for_evaluation
from lex_hf.evaluation.recall import measure_recall
from lex_hf.inference.caches import new_cache
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.records import check_file, check_folder, fingerprint, origin, read_json, write_json
from lex_hf.reproduce import models, recall_report
from lex_hf.reproduce.earlier import check_nothing_is_lost
from lex_hf.reproduce.experiment import DOES, distinct
from lex_hf.reproduce.models import LIBRARIES, Job, ensure
from lex_hf.reproduce.recall_material import Material, bytes_of, words_that_ask
from lex_hf.reproduce.recall_systems import LAYERS, RecallSystem, systems
from lex_hf.reproduce.report import RECORD, REPORT
from lex_hf.reproduce.tiny import check_seeds, check_steps, perplexity_by_length
from lex_hf.rope.blockwise import reader_of

NAME = "recall"
LENGTH = 64  # l, in tokens
MULTIPLES = (1, 2, 4, 8, 16, 32)  # of l: distances and lengths of texts
STEPS = 2000
SAMPLES = 100  # texts that ask for recall, for each distance
_EXAMPLES_PER_STEP = 32
_TOKENS_AT_ONCE = 8192
_WARMUP = 100  # steps
_ROUNDS = 3  # of the measurement of times, of which the fastest counts
_SIZES = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "initializer_range": 0.05}
_VERSION = 1  # of what is measured; a higher one repeats all measurements


def run(
    folder: Path,
    *,
    steps: int = STEPS,
    seeds: Sequence[int] = (0, 1, 2),
    samples: int = SAMPLES,
    data: Sequence[str] = (),
    tests: Sequence[str] = (),
    overwrite: bool = False,
    console: Console,
) -> dict[str, Any]:
    """Make the study: train what is missing, measure, write the report.

    Args:
        folder: Where to put everything.
        steps: Optimiser steps of each model, of 32 examples.
        seeds: Seeds of weights and of the order of examples.
        samples: Texts that ask for recall, for each distance.
        data: Texts to train on, as bytes: files as `load_documents` reads them, or `python` for the sources of
            Python's own library. By default, texts that ask for recall.
        tests: Texts whose perplexity is measured, where files are given: each `NAME=SOURCE` or `SOURCE`.
        overwrite: Whether an earlier report of other settings, or of more seeds or texts, may be replaced.
        console: Where to say what is being done.

    Returns:
        The record, as written to `record.json` beside `report.md` and the pictures.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: If an argument does not fit, the folder cannot be written to, or an earlier report there would be
            lost; before any work.
    """
    check_steps(steps)
    check_seeds(seeds)
    if tests and not data:
        raise ValueError("--test without --data: give the texts that the models are trained on, too.")
    out, start = folder / f"{NAME}-{'texts' if data else 'tiny'}", time.monotonic()
    for each in (folder, folder / "models", out):
        check_folder(each, "--output:")
    for name in recall_report.FILES if out.is_dir() else ():
        check_file(out / name, "--output:")
    material = bytes_of(data, tests) if data else words_that_ask(LENGTH * MULTIPLES[-1])
    heading = _heading(material, steps, seeds, samples)
    if not overwrite:
        check_nothing_is_lost(out / RECORD, recall_report.made, heading)
    models.join_processes(folder)
    study = _Study(material, folder / "models", steps, tuple(seeds), samples, console)
    trained = study.train()
    trained_for = time.monotonic() - start
    record = {
        **heading,
        "models": trained,
        "systems": study.measure(),
        **origin(*LIBRARIES),
    }
    record["seconds"] = {"training": trained_for, "all": time.monotonic() - start}
    if PartialState().is_main_process:
        recall_report.write(out, record)
        console.print(f"The report is in {out / REPORT}", soft_wrap=True, highlight=False)
    PartialState().wait_for_everyone()
    return record


def _heading(material: Material, steps: int, seeds: Sequence[int], samples: int) -> dict[str, Any]:
    """Return what a record says of what is made, before it is."""
    return {
        "format": 1,
        "study": NAME,
        "training_length": LENGTH,
        "multiples": list(MULTIPLES),
        "seeds": list(seeds),
        "steps": steps,
        "samples": samples,
        "unit": material.unit,
        "about_tests": material.about_tests,
        "data": material.summary,
        "tests": material.test_summaries,
    }


@dataclass(frozen=True)
class _Study:
    """All systems with the texts of one material."""

    material: Material
    folder: Path  # of the models
    steps: int
    seeds: tuple[int, ...]
    samples: int
    console: Console

    @property
    def jobs(self) -> dict[tuple[str, int], Job]:
        """The model of each system and seed; systems may share one."""
        return {(system.name, seed): self._job(system, seed) for system in systems(LENGTH) for seed in self.seeds}

    def train(self) -> list[dict[str, Any]]:
        """Train the models that are missing; return what is recorded of each, with the systems that it serves."""
        wanted, trained, examples = distinct(self.jobs), [], None
        for number, (job, served) in enumerate(wanted, start=1):
            state = job.state(self.folder)
            if state != "trained" and examples is None:
                examples = self.material.make_examples(self.steps * _EXAMPLES_PER_STEP, LENGTH)
            self._say(f"Model {number} of {len(wanted)}, {', '.join(served)}, seed {job.seed}: {DOES[state]}")
            done = ensure(job, self.folder, self.material.tokenizer, examples, _TOKENS_AT_ONCE)
            trained.append({**done, "systems": served})
        return trained

    def measure(self) -> list[dict[str, Any]]:
        """Measure all systems; return what is recorded of each."""
        places = {key: self.folder / job.name for key, job in self.jobs.items()}
        measured = {
            system.name: [self._measure(system, places[system.name, seed]) for seed in self.seeds]
            for system in systems(LENGTH)
        }
        costs = self._costs({system: place for (system, seed), place in places.items() if seed == self.seeds[0]})
        return [self._described(each, measured[each.name], costs[each.name]) for each in systems(LENGTH)]

    def _config(self, system: RecallSystem) -> PreTrainedConfig:
        last = len(self.material.tokenizer) - 1
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), last)
        return system.config(LENGTH, {**_SIZES, "vocab_size": last + 1, **ids})

    def _job(self, system: RecallSystem, seed: int) -> Job:
        training = {
            "max_steps": self.steps,
            "learning_rate": 3e-3,
            "warmup_steps": min(_WARMUP, self.steps // 3),
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": self.steps // 4, "decay_type": "linear"},
            "weight_decay": 0.1,
            "max_grad_norm": 1.0,
        }
        data = self.material.fingerprint(self.steps * _EXAMPLES_PER_STEP)
        config = self._config(system)
        return Job(config, training, _EXAMPLES_PER_STEP, seed, self.material.unit, data)

    def _measure(self, system: RecallSystem, folder: Path) -> dict[str, Any]:
        """Measure recall and perplexity of a model that reads in one way; what was measured before is read."""
        key = {
            "version": _VERSION,
            "material": self.material.fingerprint(0),
            "tests": {name: fingerprint(list(texts)) for name, texts in self.material.tests.items()},
            "reading": dict(system.reading),
            "samples": self.samples,
            "multiples": MULTIPLES,
        }
        place = folder / "measurements" / f"{NAME}-{fingerprint(key)[:12]}.json"
        if not place.is_file():
            self._say(f"Measuring {system.name}, {folder.name}")
            found = self._measurements(system, folder)
            if PartialState().is_main_process:
                write_json(place, found)
            PartialState().wait_for_everyone()
        measured: dict[str, Any] = read_json(place)
        return measured

    def _measurements(self, system: RecallSystem, folder: Path) -> dict[str, Any]:
        model, tokenizer = load_for_evaluation(str(folder), **system.reading)
        lengths, recall = [LENGTH * each for each in MULTIPLES], None
        if self.material.task is not None:
            distances, count = [LENGTH // 2, *lengths], self.samples
            recall = measure_recall(
                model, self.material.task, distances=distances, num_samples=count, progress=False, name=system.name
            ).to_dict()
        # Training examples begin anywhere in a text, so a start token would be a surprise.
        perplexity = {
            name: perplexity_by_length(model, tokenizer, texts, lengths, add_start_token=False)
            for name, texts in self.material.tests.items()
        }
        return {"recall": recall, "perplexity": perplexity}

    def _costs(self, folders: Mapping[str, Path]) -> dict[str, dict[int, Costs]]:
        """Measure costs at each length; systems take turns, and the fastest of several rounds counts."""
        self._say("Measuring time and memory")
        every = systems(LENGTH)
        loaded = {each.name: load_for_evaluation(str(folders[each.name]), **each.reading)[0] for each in every}
        found: dict[str, dict[int, Costs]] = {name: {} for name in loaded}
        for length, _ in product((LENGTH * each for each in MULTIPLES), range(_ROUNDS)):
            text = torch.arange(length) % len(self.material.tokenizer)
            for name, model in loaded.items():
                with torch.no_grad(), evaluating(model):
                    costs = measure_costs(model, partial(_empty_cache, model), text, 4 * LENGTH)
                found[name][length] = costs.fastest(found[name].get(length))
        return found

    def _described(
        self, system: RecallSystem, measured: Sequence[Mapping[str, Any]], costs: Mapping[int, Costs]
    ) -> dict[str, Any]:
        return {
            "name": system.name,
            "group": system.group,
            "kind": system.kind,
            "model": dict(system.model),
            "reading": dict(system.reading),
            "full_layers": system.full_layers(),
            "recall": [each["recall"] for each in measured],
            "perplexity": [each["perplexity"] for each in measured],
            "costs": {str(length): vars(each) for length, each in costs.items()},
        }

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)


def _empty_cache(model: PreTrainedModel) -> Cache:
    is_ours = isinstance(model.config, LexConfig) or reader_of(model) is not None
    return new_cache(model) if is_ours else DynamicCache(config=model.config)

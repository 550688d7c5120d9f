"""Make a table again: plan, train what is missing, measure, compare with the paper, write the report."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import PartialState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from lex_hf.evaluation.loading import find_device
from lex_hf.records import check_file, check_folder, origin
from lex_hf.reproduce import corpora, models, published, report, tables
from lex_hf.reproduce.console import plain_console
from lex_hf.reproduce.corpora import Corpora, Texts
from lex_hf.reproduce.earlier import Made, check_nothing_is_lost, seeds_and_tests, training_texts
from lex_hf.reproduce.experiment import Experiment, Measured, distinct
from lex_hf.reproduce.measuring import Measurement, Setting, check_texts, expectation
from lex_hf.reproduce.models import Job
from lex_hf.reproduce.presets import preset
from lex_hf.reproduce.statements import Cell, is_perplexity, marks, statements
from lex_hf.reproduce.tables import System, Table
from lex_hf.reproduce.tiny import check_seeds

_UNKNOWN = "not given"  # fingerprint of texts in a plan made without them
_WITHOUT_EFFECT = ("tokens_at_once", "needs_data")  # settings of a preset that change no result


@dataclass(frozen=True)
class Request:
    """Request for a table.

    Attributes:
        table: Name of the table, e.g. `lex-table2`.
        preset: `tiny`, `small` or `paper`.
        output: Folder of everything: models are shared by all tables that are made there.
        data: Training texts, as `load_documents` reads them; Python's own library if there are none and it is `tiny`.
        tests: Test texts, each `NAME=SOURCE` or `SOURCE`.
        seeds: Seeds of weights and of the order of examples.
        steps: Optimiser steps, instead of the preset's.
        length: l in tokens, instead of the preset's.
        tokenizer: `bytes`, `bpe:N`, or a folder or Hub id, instead of the preset's.
        also: Further systems, e.g. `sandwich` or `kerple+bca`.
        fields: Fields of `LexConfig` for all systems that do not have their own, each `NAME=VALUE`.
        segments: Number of segments under `last_token`, instead of the preset's.
        device: Where models are measured; a GPU if there is one.
        overwrite: Whether an earlier report may be replaced by one that has less, or other settings.
    """

    table: str
    preset: str
    output: Path
    data: Sequence[str] = ()
    tests: Sequence[str] = ()
    seeds: Sequence[int] = (0, 1, 2)
    steps: int | None = None
    length: int | None = None
    tokenizer: str | None = None
    also: Sequence[str] = ()
    fields: Sequence[str] = ()
    segments: int | None = None
    device: str | None = None
    overwrite: bool = False


class Plan:
    """Models and measurements that a request needs, before anything is trained.

    Args:
        request: What is asked for.
        texts: Its texts, if they are shared with other tables.

    Raises:
        ValueError: If a name or a setting of the request is unknown or impossible.
    """

    def __init__(self, request: Request, texts: Corpora | None = None) -> None:
        self.request = request
        self.texts = texts or Corpora(request.data, request.tests)
        found = tables.find(request.table)
        further = tuple(tables.further_system(each) for each in request.also)
        self.table: Table = replace(found, systems=(*found.systems, *further))
        check_seeds(request.seeds)
        self.preset = preset(
            request.preset,
            self.table.paper,
            length=request.length,
            steps=request.steps,
            segments=request.segments,
            tokenizer=request.tokenizer,
            fields=request.fields,
        )
        self.setting = Setting(self.table, self.preset, request.device)
        self.published = published.load(self.table.name)
        self.configs = {system.name: self.preset.config(self.table, system) for system in self.table.systems}
        if len(self.configs) < len(self.table.systems):
            raise ValueError(f"--also {' '.join(request.also)}: a system is given twice.")
        self.models = request.output / "models"
        self.folder = request.output / f"{self.table.name}-{self.preset.name}"  # of the report
        self.trains = self.table.measure != "expectation"
        self.has_data = bool(request.data) or not self.preset.needs_data

    @property
    def training(self) -> Texts:
        """Training texts; a `ValueError` if none are given and the preset needs them."""
        if not self.has_data:
            raise ValueError(
                f"--preset {self.preset.name} needs texts to train on: give --data FILES and --test FILES."
            )
        return self.texts.training

    @property
    def tests(self) -> list[Texts]:
        """Sets of test texts."""
        return self.texts.tests

    def job(self, system: System, seed: int) -> Job:
        """Return the model of a system and a seed."""
        config = self.configs[system.name]
        data = self.training.sha256 if self.has_data else _UNKNOWN
        tokenizer = self.preset.tokenizer
        fingerprint = corpora.tokenizer_fingerprint(tokenizer, self.training) if self.has_data else tokenizer
        examples = self.preset.examples_per_step(config.training_length)
        return Job(config, self.preset.training, examples, seed, fingerprint, data)

    @cached_property
    def jobs_by_system(self) -> dict[tuple[str, int], Job]:
        """Model of each system and seed."""
        systems = self.table.systems if self.trains else ()
        return {(system.name, seed): self.job(system, seed) for system in systems for seed in self.request.seeds}

    @property
    def jobs(self) -> list[tuple[Job, list[str]]]:
        """Each model once, and the systems that it serves."""
        return distinct(self.jobs_by_system)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan, ready for JSON: models to train with parameters, steps and tokens, and what is measured."""
        return {
            "table": self.table.name,
            "preset": self.preset.name,
            "training_length": self.preset.length,
            "measure": self.table.measure,
            "lengths": [self.setting.length(printed) for printed in self.table.lengths],
            "models": [
                {
                    "name": job.name,
                    "systems": systems,
                    "seed": job.seed,
                    "parameters": job.parameters(),
                    "steps": job.steps,
                    "tokens": job.tokens,
                    "state": job.state(self.models) if self.has_data else "missing",
                }
                for job, systems in self.jobs
            ],
            "evaluations": [
                {"system": system.name, "pattern": system.pattern, "seeds": list(self.request.seeds)}
                for system in self.table.systems
            ],
            "tests": [texts.summary() for texts in self.tests] if self.trains and self.has_data else [],
            "data": self.training.summary() if self.trains and self.has_data else None,
        }


def run(request: Request, *, console: Console | None = None) -> dict[str, Any]:
    """Make a table; models and measurements that are there are not made again.

    Args:
        request: What is asked for.
        console: Where progress is reported.

    Returns:
        The record, as written to `record.json` beside `report.md` and the pictures.

    Raises:
        KeyboardInterrupt: If training was stopped; the same call resumes it.
        ValueError: If the request is impossible, or as [`begin`]; before any work.
    """
    plan = Plan(request)
    begin([plan])
    return make(plan, console or plain_console())


def begin(planned: Sequence[Plan]) -> None:
    """Check, before any work, that plans of one request can be carried out, and join the processes that do it.

    Raises:
        ValueError: If there is no such device, reports cannot be written or earlier ones would be lost, or test texts
            are too short.
    """
    request = planned[0].request
    find_device(request.device)
    for plan in planned:
        check_output(plan)
    models.join_processes(request.output)
    for plan in planned:
        _check_tests(plan)


def make(plan: Plan, console: Console) -> dict[str, Any]:
    """Carry out a plan that was begun; see [`run`]."""
    start = time.monotonic()
    console = console if PartialState().is_main_process else plain_console(quiet=True)
    experiment = _experiment(plan, console) if plan.trains else None
    trained = [] if experiment is None else experiment.train(_tokenizer(plan))
    trained_for = time.monotonic() - start
    results = {report.NO_TEXTS: _expectations(plan)} if experiment is None else experiment.measure()
    record = {
        **heading(plan),
        **origin(*models.LIBRARIES),
        "models": [{**each, "systems": systems} for each, systems in trained],
        "results": {name: _result(plan, name, cells) for name, cells in results.items()},
        "seconds": {"training": trained_for, "all": time.monotonic() - start},
    }
    if PartialState().is_main_process:
        _write(plan.folder, record)
        console.print(f"The report is in {plan.folder / report.REPORT}", soft_wrap=True, highlight=False)
    PartialState().wait_for_everyone()
    return record


def check_output(plan: Plan) -> None:
    """Check that a report can be written and none is lost, else `ValueError`; what trains must have its texts."""
    for folder in (plan.request.output, plan.models, plan.folder):
        check_folder(folder, "--output:")
    for name in (report.RECORD, report.REPORT) if plan.folder.is_dir() else ():
        check_file(plan.folder / name, "--output:")
    if not plan.request.overwrite:
        check_nothing_is_lost(plan.folder / report.RECORD, made, heading(plan))


def _check_tests(plan: Plan) -> None:
    """Check that test texts are long enough; that needs the tokenizer, which is made."""
    if plan.trains:
        tokenizer = _tokenizer(plan)
        for texts in plan.tests:
            check_texts(plan.setting, texts, tokenizer)


def _write(folder: Path, record: dict[str, Any]) -> None:
    """Write the report; if it cannot be written it is printed, on standard error beside the reason."""
    try:
        report.write(folder, record)
    except (OSError, ValueError):
        plain_console(stderr=True).print(report.render(record), soft_wrap=True)
        raise


def _experiment(plan: Plan, console: Console) -> Experiment:
    return Experiment(
        plan.setting,
        plan.jobs_by_system,
        models=plan.models,
        training=plan.training.documents,
        tests=plan.tests,  # texts that cannot be read fail before hours of training
        report=lambda line: console.print(line, markup=False, highlight=False),
    )


def _tokenizer(plan: Plan) -> PreTrainedTokenizerBase:
    with PartialState().main_process_first():
        return corpora.load_tokenizer(plan.preset.tokenizer, plan.training, plan.request.output / "tokenizers")


def _expectations(plan: Plan) -> Measured:
    return {name: [expectation(plan.setting, config)] for name, config in plan.configs.items()}


def heading(plan: Plan) -> dict[str, Any]:
    """Return what a record says of what is made, and of which texts; known before processes are joined."""
    return {
        "format": 1,
        "table": plan.table.name,
        "published": asdict(plan.published),
        "preset": asdict(plan.preset),
        "measure": plan.table.measure,
        "perplexity": is_perplexity(plan.table),
        "training_length": plan.preset.length,
        "lengths": {str(printed): plan.setting.length(printed) for printed in plan.table.lengths},
        "columns": plan.table.column_names,
        "by_length": plan.table.columns is None,
        "reference": plan.table.reference,
        "systems": {
            system.name: {"model": dict(system.model), "pattern": system.pattern, "group": system.group}
            for system in plan.table.systems
        },
        "seeds": list(plan.request.seeds) if plan.trains else [],
        "data": plan.training.summary() if plan.trains else None,
        "tests": {texts.name: texts.summary() for texts in plan.tests} if plan.trains else {},
    }


def made(record: Mapping[str, Any]) -> Made:
    """Return what the report of a record, or of a heading, is of."""
    systems = {f"the system {name}": system for name, system in record["systems"].items()}
    return Made(dict(_settings(record["preset"])) | training_texts(record), seeds_and_tests(record) | systems)


def _settings(preset: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all settings of a preset: those of models and training beside the others."""
    for name, value in preset.items():
        if isinstance(value, Mapping):
            yield from value.items()
        elif name not in _WITHOUT_EFFECT:
            yield name, value


def _result(plan: Plan, name: str, measured: Measured) -> dict[str, Any]:
    corpus = plan.published.corpus_for(name)
    cells = {
        system: {column: _cell([each[column] for each in seeds], exact=not plan.trains) for column in seeds[0]}
        for system, seeds in measured.items()
    }
    found = marks(plan.table, cells)
    return {
        "corpus": corpus,
        "cells": {
            system: {
                column: {
                    **asdict(cell),
                    "mean": cell.mean,
                    "seed_interval": cell.seed_interval(),
                    "document_interval": cell.document_interval(),
                    "mark": found.get((system, column), ""),
                }
                for column, cell in row.items()
            }
            for system, row in cells.items()
        },
        "curves": {system: _mean_curves(seeds) for system, seeds in measured.items()},
        "statements": [asdict(each) for each in statements(plan.table, plan.published, corpus, cells)],
    }


def _cell(seeds: Sequence[Measurement], *, exact: bool) -> Cell:
    return Cell(
        values=[each.value for each in seeds],
        documents=[each.documents for each in seeds if each.documents],
        weights=seeds[0].weights,
        exact=exact,
    )


def _mean_curves(seeds: Sequence[dict[str, Measurement]]) -> dict[str, list[float]]:
    """Return the mean over the seeds of what is drawn, by column."""
    drawn = {column: [each[column].curve for each in seeds] for column, first in seeds[0].items() if first.curve}
    return {
        column: [sum(values) / len(values) for values in zip(*curves, strict=True)] for column, curves in drawn.items()
    }

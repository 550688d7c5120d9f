"""Recipes: a whole training in one readable file, from the sizes of the model to the examples in a step."""

import dataclasses
import difflib
import math
import reprlib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from accelerate.utils import get_cpu_distributed_information
from huggingface_hub.dataclasses import type_validator
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TrainingArguments

from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.errors import plain
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.training.arguments import training_arguments
from lex_hf.training.estimate import Estimate, estimate, fields_of
from lex_hf.training.recipe_files import parse_yaml, read_recipe
from lex_hf.training.run_record import Change

# Fields of the model that belong to its tokenizer.
_OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
# Fields of TrainingArguments that do not belong in a recipe, and the replacement.
_ELSEWHERE = {
    "output_dir": "--output",
    "resume_from_checkpoint": "--resume",
    "gradient_accumulation_steps": "examples_per_step of data",
    "ignore_data_skip": "nothing: it is chosen by what is resumed",
    "include_num_input_tokens_seen": "nothing: all tokens are counted",
    "restore_callback_states_from_checkpoint": "nothing: a resumed training restores its own",
    "auto_find_batch_size": "per_device_train_batch_size, so that a step has the examples that the recipe says",
}
# Abilities that the machine must have to train, not to plan.
_OF_MACHINE: dict[str, Any] = {"bf16": False, "fp16": False, "tf32": None, "fsdp": None, "fsdp_config": None}


@dataclass(frozen=True)
class DataSettings:
    """Settings by which texts become the examples of a step."""

    tokenizer: str | None = None  # folder or Hub id, or "bytes" (one token per byte); None if one must be given
    length: int | None = None  # tokens in an example; the model's training length by default
    examples_per_step: int | None = None  # over all processes; by default as many as the devices take at once
    separate_documents: bool = False  # whether tokens see, and are predicted from, their own document only
    streaming: bool = False  # whether documents are read during training, for data larger than memory
    shuffle_buffer: int = 1000  # examples of a stream that are shuffled together
    text_field: str = "text"  # field of JSON lines, or column of a Hub dataset, that holds the text
    split: str = "train"  # of a Hub dataset

    def __post_init__(self) -> None:
        for name, least in (("length", 2), ("examples_per_step", 1), ("shuffle_buffer", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"data.{name} = {value}: it must be at least {least}.")


# Names and types of the fields of each section.
_KNOWN: dict[str, dict[str, Any]] = {
    "model": dict(LexConfig.__annotations__),
    "training": {each.name: each.type for each in dataclasses.fields(TrainingArguments)},
    "data": {each.name: each.type for each in dataclasses.fields(DataSettings)},
}


@dataclass(frozen=True)
class Recipe:
    """A training, as described by a recipe file."""

    name: str  # or its path
    model: dict[str, Any] = field(default_factory=dict)  # fields of LexConfig
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainingArguments
    data: DataSettings = field(default_factory=DataSettings)

    def override(self, assignments: Iterable[str]) -> "Recipe":
        """Change fields by assignments `NAME=VALUE`.

        The value is YAML, and the name a field of the model, the training or the data, with its section if that is
        ambiguous: `hidden_size=64`, `model.use_cache=false`.

        Raises:
            ValueError: If there is no such field, or the value has the wrong type.
        """
        sections: dict[str, dict[str, Any]] = {name: {} for name in _KNOWN}
        for text in assignments:
            key, equals, value = text.partition("=")
            if not equals:
                raise ValueError(f"--set {text}: it must be NAME=VALUE, e.g. max_steps=2000.")
            section, name = _locate(key.strip(), f"--set {text}")
            sections[section][name] = parse_yaml(value, f"--set {text}")
        return self._with(sections, "--set")

    def with_tokenizer(self, name: str) -> "Recipe":
        """Replace the tokenizer, and drop the fields of the model that belong to the previous one."""
        model = {key: value for key, value in self.model.items() if key not in _OF_TOKENIZER}
        return dataclasses.replace(self, model=model, data=dataclasses.replace(self.data, tokenizer=name))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer.

        Raises:
            ValueError: If the recipe names none.
            OSError: If it cannot be loaded.
        """
        name = self.data.tokenizer
        if name is None:
            raise ValueError(
                f"The recipe {self.name} names no tokenizer: give a folder or Hub id with --tokenizer. `lex-hf "
                "tokenizer` trains one."
            )
        return load_tokenizer(name)

    def config(self, tokenizer: PreTrainedTokenizerBase | None = None) -> LexConfig:
        """Make the configuration of the model; the tokenizer gives the vocabulary fields that the recipe lacks.

        Raises:
            huggingface_hub.errors.StrictDataclassError: If a field has an impossible value.
            ValueError: If the size of the vocabulary is unknown.
        """
        fields = dict(self.model)
        if tokenizer is not None:
            known = {"vocab_size": len(tokenizer)} | {name: getattr(tokenizer, name) for name in _OF_TOKENIZER[1:]}
            fields = known | fields
        elif "vocab_size" not in fields:
            raise ValueError(f"The recipe {self.name} has no vocab_size, and no tokenizer was given.")
        # A distance of half an example scales by ζ, as in the paper.
        fields.setdefault("xpos_scale_base", fields.get("training_length", LexConfig.training_length) // 2)
        return LexConfig(**fields)

    def arguments(self, output_dir: str | Path) -> TrainingArguments:
        """Make the arguments of the Trainer, with as many accumulated batches as a step needs on these devices.

        Raises:
            ValueError: If a value is impossible, or the examples of a step cannot be divided evenly.
        """
        arguments = training_arguments(output_dir, **self.training)
        devices = arguments.world_size * max(1, arguments.n_gpu)
        arguments.gradient_accumulation_steps = self.accumulation(devices)
        return arguments

    def accumulation(self, devices: int) -> int:
        """Return the number of batches that each device takes for a step.

        Raises:
            ValueError: If that is not a whole number.
        """
        batch = self.setting("per_device_train_batch_size")
        if batch < 1:
            raise ValueError(f"per_device_train_batch_size = {batch}: it must be at least 1.")
        wanted = self.data.examples_per_step
        if wanted is None:
            return 1
        if wanted % (batch * devices):
            raise ValueError(
                f"examples_per_step = {wanted}: it must be a multiple of per_device_train_batch_size x devices = "
                f"{batch} x {devices}. Change one of them with --set."
            )
        return wanted // (batch * devices)

    def warmup_steps(self, steps: int) -> int:
        """Return the warm-up of a training of `steps` steps: the recipe's share of them, rounded down."""
        warmup, printed = self.setting("warmup_steps"), int(self.setting("max_steps"))
        # As TrainingArguments counts; making those would settle the devices of this process.
        count = int(warmup) if warmup >= 1 else math.ceil(printed * warmup)
        return count * steps // printed

    def length(self, config: Any) -> int:
        """Return the tokens in an example: the recipe's, or else the training length of the model.

        Raises:
            ValueError: If both are missing.
        """
        length = self.data.length or getattr(config, "training_length", None)
        if length is None:
            raise ValueError(f"A {config.model_type} model has no training length: give --set length=1024.")
        return int(length)

    def estimate(self, config: LexConfig, devices: int | None = None) -> Estimate:
        """Estimate what the training takes on a number of devices: by default those here, or those of a launcher.

        Raises:
            ValueError: If the examples of a step cannot be divided evenly.
        """
        if devices is None:
            devices = max(get_cpu_distributed_information().world_size, torch.accelerator.device_count(), 1)
        steps = self.setting("max_steps")
        again = [
            name for name in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, name)
        ]
        return estimate(
            config,
            length=self.length(config),
            batch_size=self.setting("per_device_train_batch_size"),
            accumulation=self.accumulation(devices),
            devices=devices,
            steps=steps if steps > 0 else None,
            optimizer=str(getattr(self.setting("optim"), "value", self.setting("optim"))),
            mixed_precision=bool(self.setting("bf16") or self.setting("fp16")),
            activation_checkpointing=any(self.setting(name) for name in again),
            sharded=bool(self.setting("fsdp")),
        )

    def setting(self, name: str) -> Any:
        """Return a field of the training: the recipe's, or else the default of `TrainingArguments`."""
        return self.training.get(name, getattr(TrainingArguments, name))

    def check_training(self) -> None:
        """Let `TrainingArguments` check all values except those that need abilities of this machine."""
        training_arguments("plan", **(self.training | _OF_MACHINE))

    def to_yaml(self, config: LexConfig | None = None, changes: Iterable[Change] = ()) -> str:
        """Write the recipe, with all fields of the model if its configuration is given.

        Changes when the training was resumed are comments at the beginning, since the values of the recipe are those
        of the last steps.
        """
        model = self.model if config is None else fields_of(config)
        sections = {"model": model, "training": self.training, "data": dataclasses.asdict(self.data)}
        comments = [f"# Resumed with changes: {change}.".replace("\n", " ") + "\n" for change in changes]
        text: str = yaml.safe_dump(sections, sort_keys=False, default_flow_style=False)
        return "".join(comments) + text

    def _with(self, sections: Mapping[str, dict[str, Any]], where: str) -> "Recipe":
        for section, fields in sections.items():
            for name, value in fields.items():
                _check(section, name, value, where)
        model, training = self.model | sections["model"], self.training | sections["training"]
        data = dataclasses.replace(self.data, **sections["data"])
        return dataclasses.replace(self, model=model, training=training, data=data)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, or that of `"bytes"`.

    Raises:
        ValueError: If there is none that loads.
    """
    if name == "bytes":
        return byte_tokenizer()
    missing = f"{name}: no tokenizer that loads. Give a folder or Hub id that has one with --tokenizer."
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # damaged files make the libraries raise anything
        raise ValueError(f"{missing} ({plain(error)})") from error
    # For a model without one, transformers makes a tokenizer of the special tokens only.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(missing)
    return tokenizer


def model_fields(assignments: Iterable[str]) -> dict[str, Any]:
    """Read fields of `LexConfig` that are written as for [`Recipe.override`].

    Raises:
        ValueError: If one is not a field of the model.
    """
    recipe = Recipe("--set").override(assignments)
    if recipe.training or recipe.data != DataSettings():
        raise ValueError("--set takes the fields of LexConfig here, e.g. training_length=512.")
    return recipe.model


def load_recipe(name: str | Path) -> Recipe:
    """Read a recipe that comes with the package, by its name, or from the path of a YAML file.

    Its sections are `model` (fields of `LexConfig`), `training` (fields of `TrainingArguments`) and `data` (fields of
    [`DataSettings`]).

    Raises:
        ValueError: If there is none of that name, it is not valid YAML, has an unknown key, or a value of the wrong
            type; the message says where, and what is allowed.
    """
    where = str(name)
    sections = read_recipe(name) or {}
    if not isinstance(sections, dict):
        raise ValueError(f"{where}: a recipe has the sections {', '.join(_KNOWN)}; this is {type(sections).__name__}.")
    for section, fields in sections.items():
        if section not in _KNOWN:
            raise ValueError(f"{where}: no section {section!r}; {_nearest(str(section), _KNOWN)}.")
        if not isinstance(fields, dict | None):
            raise ValueError(f"{where}: the section {section!r} must hold fields, e.g. max_steps: 2000.")
    return Recipe(where)._with({name: sections.get(name) or {} for name in _KNOWN}, where)


def _locate(key: str, where: str) -> tuple[str, str]:
    """Find the section of a field."""
    section, dot, name = key.partition(".")
    if dot and section in _KNOWN:
        _check_name(section, name, where)
        return section, name
    found = [section for section, names in _KNOWN.items() if key in names]
    if not found:
        everything = [name for names in _KNOWN.values() for name in names]
        raise ValueError(f"{where}: no field of a recipe is called {key!r}; {_nearest(key, everything)}.")
    if len(found) > 1:
        raise ValueError(f"{where}: it may mean {' or '.join(f'{each}.{key}' for each in found)}; write which.")
    return found[0], key


def _check_name(section: str, name: str, where: str) -> None:
    if not isinstance(name, str) or name not in _KNOWN[section]:
        raise ValueError(f"{where}: {section} has no field {name!r}; {_nearest(str(name), _KNOWN[section])}.")
    if section == "training" and name in _ELSEWHERE:
        raise ValueError(f"{where}: {name} does not belong in a recipe; use {_ELSEWHERE[name]}.")


def _nearest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"the closest that there is: {close[0]!r}"
    return f"there are: {', '.join(names)}" if len(names) < 10 else "see the fields of LexConfig and TrainingArguments"


def _check(section: str, name: str, value: Any, where: str) -> None:
    _check_name(section, name, where)
    kind = _KNOWN[section][name]
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError(f"{where}: {section}.{name} = {reprlib.repr(value)} is too large a number.")
    # A whole number is accepted where TrainingArguments has a float.
    candidates = [value, float(value)] if type(value) is int else [value]
    for candidate in candidates:
        try:
            type_validator(name, candidate, kind)
        except TypeError:
            continue
        return
    wanted = getattr(kind, "__name__", str(kind)) if not typing.get_args(kind) else str(kind)
    raise ValueError(
        f"{where}: {section}.{name} = {reprlib.repr(value)} is {type(value).__name__}; it must be {wanted}."
    )

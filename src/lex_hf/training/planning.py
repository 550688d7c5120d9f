"""From a recipe and what is changed of it to a trained model: the model, its examples, and the folder."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from datasets import Dataset
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from lex_hf.data.documents import load_documents, stream_documents
from lex_hf.data.packing import pack
from lex_hf.data.streaming import PackedStream
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.model.configuration_lex import LexConfig
from lex_hf.model.modeling_lex import LexForCausalLM
from lex_hf.records import check_folder, write_text
from lex_hf.training import trainer
from lex_hf.training.arguments import check_arguments, examples_per_step
from lex_hf.training.recipes import Recipe
from lex_hf.training.run_folder import RECIPE_NAME, claimed
from lex_hf.training.run_record import Change

Packing = Callable[[PreTrainedTokenizerBase, int], Dataset | PackedStream]  # from a tokenizer and a length


def customize(
    recipe: Recipe, *, model: str | None = None, tokenizer: str | None = None, assignments: Collection[str] = ()
) -> Recipe:
    """Return a recipe with what `lex-hf train` changes of it.

    A `model` to fine-tune has a configuration and a tokenizer of its own. Assignments are as of [`Recipe.override`].

    Raises:
        ValueError: If there is no model, the model would get a second configuration or tokenizer, or a field or a
            value is impossible.
    """
    if model is not None:
        recipe = replace(recipe, model={}, data=replace(recipe.data, tokenizer=model))
        if tokenizer is not None:
            raise ValueError(f"--tokenizer {tokenizer}: --model {model} has a tokenizer of its own.")
    elif not recipe.model:
        raise ValueError(f"The recipe {recipe.name} describes no model: give one with --model.")
    if tokenizer is not None:
        recipe = recipe.with_tokenizer(tokenizer)
    recipe = recipe.override(assignments)
    if model is not None and recipe.model:
        raise ValueError(f"--set {next(iter(recipe.model))}: --model {model} has a configuration of its own.")
    return recipe


def planned_config(recipe: Recipe, model: str | None = None) -> LexConfig:
    """Return the configuration of the model to train; no weights are loaded, and no tokenizer unless it is needed.

    Raises:
        ValueError: If the model to fine-tune is not a LEX model.
    """
    if model is None:
        return recipe.config(None if "vocab_size" in recipe.model else recipe.tokenizer())
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, LexConfig):
        raise ValueError(f"--dry-run supports LEX models only; {model} is of type {config.model_type!r}.")
    return config


def train_recipe(
    recipe: Recipe,
    sources: Sequence[str],
    output: Path,
    *,
    eval_sources: Sequence[str] = (),
    model: str | None = None,
    resume: bool = False,
    allow_changes: Collection[str] = (),
    overwrite: bool = False,
    announce: Callable[[str], None] = lambda size: None,
) -> trainer.TrainingResult:
    """Train as a recipe says, and leave the recipe with the model.

    Args:
        recipe: The recipe; see [`customize`].
        sources: Texts to train on, as `load_documents` reads them.
        output: Folder for checkpoints, the model, its tokenizer and the recipe.
        eval_sources: Held-back texts, for `eval_strategy`.
        model: Folder or Hub id of a model to fine-tune, instead of the recipe's new one.
        resume: As of [`lex_hf.training.train`].
        allow_changes: The same.
        overwrite: The same.
        announce: Called by the main process with the size of the training, before it begins.

    Raises:
        ValueError: If the recipe, the texts or the folder do not fit; see [`lex_hf.training.train`].
        OSError: If texts cannot be read, or the folder cannot be written to.
    """
    check_folder(output, "--output")
    # First: they find the processes of a launcher and their devices, which loading a model would settle otherwise.
    arguments = recipe.arguments(output)
    check_arguments(arguments, resume, allow_changes)
    with claimed(arguments, resume=resume, overwrite=overwrite, also=[RECIPE_NAME]):
        pack_training = packing(recipe, sources, arguments.seed)
        set_seed(arguments.seed)
        network, tokenizer = _model_and_tokenizer(recipe, model)
        length = recipe.length(network.config)
        held_back = None
        if eval_sources:
            held_back = packing(recipe, eval_sources, arguments.seed, in_memory=True)(tokenizer, length)
        examples = pack_training(tokenizer, length)
        if arguments.process_index == 0:
            size = f"{network.num_parameters()} parameters, {examples_per_step(arguments) * length} tokens a step"
            announce(f"{recipe.name}: {size}, {arguments.world_size} processes")

        def keep_recipe(changes: list[Change]) -> None:
            text = recipe.to_yaml(None if model else network.config, changes)
            write_text(Path(arguments.output_dir) / RECIPE_NAME, text)

        return trainer.train(
            network,
            tokenizer,
            examples,
            arguments,
            eval_dataset=held_back,
            on_save=keep_recipe,
            resume=resume,
            allow_changes=allow_changes,
            overwrite=overwrite,
        )


def packing(recipe: Recipe, sources: Sequence[str], seed: int, *, in_memory: bool = False) -> Packing:
    """Find the documents, so that missing ones are reported at once; return a function that packs them.

    The function takes a tokenizer and a length in tokens. The seed is that of the order of a stream; examples that
    must be `in_memory` are not streamed, whatever the recipe says.
    """
    data, apart = recipe.data, recipe.data.separate_documents
    options = {"text_field": data.text_field, "split": data.split}
    if data.streaming and not in_memory:
        stream = stream_documents(sources, **options)
        order = {"shuffle_buffer": data.shuffle_buffer, "seed": seed}
        return partial(PackedStream, stream, separate_documents=apart, sources=sources, **order)
    return partial(pack, load_documents(sources, **options), separate_documents=apart)


def _model_and_tokenizer(recipe: Recipe, model: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if model is not None:
        return load_for_evaluation(model, device="cpu")
    tokenizer = recipe.tokenizer()
    return LexForCausalLM(recipe.config(tokenizer)), tokenizer

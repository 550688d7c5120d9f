"""Trainings: train, tokenizer, warm-start."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from lex_hf.cli.options import Assignments, Files, Json, TextField
from lex_hf.cli.printing import is_main_process, new_table, notices, number, print_json, session, show
from lex_hf.records import check_new_folder


def train(
    recipe: Annotated[
        str,
        typer.Argument(help="gpt-medium, sandwich-162m, small, hybrid, tiny, fine-tune, or the path of a recipe."),
    ],
    files: Annotated[list[str] | None, typer.Argument(help="Texts to train on, as under --data.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="Texts to train on: text files, JSON lines (.jsonl, .jsonl.gz), folders of them, or names of Hub "
            "datasets; several times, or several in a row.",
        ),
    ] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option(help="Held-back texts, for --set eval_strategy=steps; several times.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for checkpoints and the trained model.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub id to fine-tune, in place of the recipe's new model.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Another tokenizer: a folder or Hub id, or 'bytes' (one token per byte)."),
    ] = None,
    assignments: Assignments = None,
    resume: Annotated[bool, typer.Option(help="Continue from the last complete checkpoint in the output.")] = False,
    allow_change: Annotated[
        list[str] | None,
        typer.Option(help="With --resume: a setting that may differ from before, e.g. learning_rate; several times."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the model, checkpoints and recipe.yaml in the output; all else is kept.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what it would take: parameters, tokens, memory, FLOPs.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="With --dry-run: number of devices to plan for; those here by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on texts, as a recipe says; every field of it can be changed with --set.

    Ctrl-C saves a checkpoint first; the same command with --resume continues from there. Under torchrun or accelerate
    launch all processes train one model.
    """
    from lex_hf.training.planning import customize, planned_config, train_recipe
    from lex_hf.training.recipes import load_recipe

    with session(as_json) as console:
        plan = customize(load_recipe(recipe), model=model, tokenizer=tokenizer, assignments=assignments or [])
        if dry_run:
            config = planned_config(plan, model)
            plan.check_training()
            estimate, text = plan.estimate(config, processes), plan.to_yaml(None if model else config)
    if dry_run:
        if as_json:
            print_json(estimate.to_dict() | {"recipe": text})
        elif is_main_process():
            _print_estimate(console, plan.name, estimate, text)
        return
    with session(as_json):
        sources = [*(data or []), *(files or [])]
        if output is None or not sources:
            raise ValueError("A training needs texts and a folder: --data FILES --output DIR.")
        result = train_recipe(
            plan,
            sources,
            output,
            eval_sources=eval_data or [],
            model=model,
            resume=resume,
            allow_changes=allow_change or [],
            overwrite=overwrite,
            announce=notices().print,
        )
        if not is_main_process():
            return
    figures = f"{result.steps} steps, {result.tokens} tokens, mean loss {result.train_loss:.4f} nats per token"
    show(console, as_json, result.to_dict(), f"{figures}; the model is in {result.model_folder}")


def tokenizer(
    files: Files,
    output: Annotated[Path, typer.Option(help="Folder for the tokenizer; a new one.")],
    vocab_size: Annotated[int, typer.Option(min=257, help="Number of tokens.")] = 8192,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer, the kind of GPT-2; texts may be larger than memory."""
    from lex_hf.data.documents import stream_documents
    from lex_hf.data.tokenizers import train_tokenizer
    from lex_hf.training.saving import save_pretrained

    with session(as_json) as console:
        check_new_folder(output, "--output")
        texts = (document["text"] for document in stream_documents(files, text_field=text_field))
        trained = train_tokenizer(texts, vocab_size)
        save_pretrained(output, trained)
    result = {"tokens": len(trained), "folder": str(output)}
    show(console, as_json, result, f"{len(trained)} tokens; the tokenizer is in {output}")


def warm_start(
    source: Annotated[
        str, typer.Argument(help="Folder or Hub id of a GPT-2, or file of an official (torchscale) checkpoint.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder for the LEX model; a new one.")],
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id of its tokenizer, or 'bytes'; GPT-2 brings its own.")
    ] = None,
    assignments: Assignments = None,
    as_json: Json = False,
) -> None:
    """Make a LEX model that begins with the weights of another, to be fine-tuned.

    --set takes the fields of LexConfig, e.g. --set training_length=512.
    """
    from lex_hf.convert import warm_start as converting
    from lex_hf.training.recipes import model_fields

    with session(as_json) as console:
        check_new_folder(output, "OUTPUT")
        fields = model_fields(assignments or [])
        converted, name = converting.warm_start(source, output, tokenizer=tokenizer, **fields)
    count = sum(parameter.numel() for parameter in converted.parameters())
    result = {"parameters": count, "tokenizer": name, "folder": str(output)}
    show(console, as_json, result, f"{count} parameters; the model is in {output}")


def _print_estimate(console: Console, name: str, estimate: Any, text: str) -> None:
    """Print what a training would take, and the recipe with all that was changed."""
    from lex_hf.training.estimate import HOW_MEMORY_IS_ESTIMATED

    memory = estimate.memory
    rows = (
        ("parameters", _amount(estimate.parameters)),
        ("of these no embeddings", _amount(estimate.parameters_without_embeddings)),
        ("devices", _amount(estimate.devices)),
        ("examples that a device takes at once", _amount(estimate.batch_size)),
        ("batches that a device takes for a step", _amount(estimate.accumulation)),
        ("tokens per step, over all devices", _amount(estimate.tokens_per_step)),
        ("steps", _amount(estimate.steps)),
        ("tokens", _amount(estimate.tokens)),
        ("floating-point operations, 6 N T + attention", _amount(estimate.flops, ".3g")),
        ("memory of a device: weights", _amount(memory.weights, "GiB")),
        ("gradients", _amount(memory.gradients, "GiB")),
        ("optimiser", _amount(memory.optimizer, "GiB")),
        ("activations", _amount(memory.activations, "GiB")),
        ("together", _amount(memory.total, "GiB")),
    )
    console.print(new_table(f"{name}: what it takes", [Column("what", overflow="fold"), number("how much")], rows))
    console.print(f"Memory. {HOW_MEMORY_IS_ESTIMATED}", "", text, sep="\n")


def _amount(value: int | None, form: str = ",") -> str:
    if value is None:
        return "not known"
    return f"{value / 2**30:.2f} GiB" if form == "GiB" else f"{value:{form}}"

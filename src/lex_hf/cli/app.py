"""The command line: parse, call one function of the Python API, print."""

import contextlib
import math
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from lex_hf import __version__
from lex_hf.cli.terminal import errors_as_sentences, plain_console, write_any_text
from lex_hf.records import check_file, check_folder, check_new_folder, to_json, whole_file, whole_folder, write_text


class _Commands(TyperGroup):
    """All commands: what goes wrong in one is said in a sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        write_any_text()
        with errors_as_sentences():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Length-Extrapolatable Transformers: train on short texts, read and write long ones.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its columns cut option names short in a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"lex-hf {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


_MOST = 10**9  # of steps and of tokens
_LARGEST_SEED = 2**32 - 1  # of NumPy


def _finite(value: float) -> float:
    """Refuse NaN and infinity, which ranges let pass."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


Model = Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")]
Files = Annotated[
    list[str],
    typer.Argument(help="Text files, JSON lines (.jsonl, .jsonl.gz), folders of them, or names of Hub datasets."),
]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result as JSON, in which infinite numbers and NaN become null; all else goes to standard "
        "error.",
    ),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …; a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")]
Pattern = Annotated[str | None, typer.Option(help="blockwise, sliding or full; the model's own by default.")]
Trust = Annotated[bool, typer.Option(help="Let code that comes with the model run.")]
Protocol = Annotated[
    str,
    typer.Option(
        help="chunked (segments alone), sliding (windows that overlap), streaming (one pass) or last_token "
        "(the last token of each segment, with several numbers of tokens before it)."
    ),
]
Stride = Annotated[
    int | None, typer.Option(help="Of sliding: tokens between two windows; half the length by default.")
]
Contexts = Annotated[
    list[int] | None,
    typer.Option(help="Of last_token: tokens before the one scored; several times; powers of two by default."),
]
BatchSize = Annotated[str, typer.Option(help="Windows evaluated at once; 'auto' takes as many as memory allows.")]
StartToken = Annotated[bool, typer.Option(help="Put the BOS token before each text.")]
Records = Annotated[
    Path | None,
    typer.Option(help="File of finished texts: a run that was stopped goes on from it. May serve several runs."),
]


@app.command()
def demo(
    output: Annotated[Path, typer.Option(help="Folder for models, results and the plot.")] = Path("demo_output"),
    steps: Annotated[int, typer.Option(min=1, max=_MOST, help="Optimiser steps for each of the two models.")] = 1500,
    generate: Annotated[int, typer.Option(min=1, max=_MOST, help="Tokens to generate.")] = 2000,
) -> None:
    """Train a tiny LEX on Python's own library, evaluate it at 16 times its training length, generate."""
    from lex_hf.reproduce import demo as story

    with _session() as console:
        story.run(output, steps=steps, generate=generate, console=console)


@app.command()
def extrapolation(
    output: Annotated[Path, typer.Option(help="Folder for models, table, plot and JSON; used again if it exists.")],
    scheme: Annotated[list[str] | None, typer.Option(help="A position scheme; all of them by default.")] = None,
    seed: Annotated[
        list[int] | None, typer.Option(min=0, max=_LARGEST_SEED, help="A seed; 0 and 1 by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, max=_MOST, help="Optimiser steps of each model.")] = 1500,
) -> None:
    """Train a tiny model for each position scheme and compare them at up to 16 times the training length."""
    from lex_hf.model.positions_lex import SCHEMES
    from lex_hf.reproduce import extrapolation as comparison

    with _session() as console:
        comparison.run(output, schemes=scheme or tuple(SCHEMES), seeds=seed or (0, 1), steps=steps, console=console)


@app.command()
def reproduce(
    table: Annotated[
        str,
        typer.Argument(
            help="lex-table2 … lex-table6, lex-figure1, lex-figure2 (arXiv 2212.10554); sandwich-table1, -table2, "
            "-table3, -table5, sandwich-figure4 … -figure7, -figure11 (arXiv 2212.10356)."
        ),
    ],
    preset: Annotated[
        str, typer.Option(help="tiny (two CPU cores), small (one GPU) or paper (as printed, on a cluster).")
    ] = "tiny",
    output: Annotated[
        Path, typer.Option(help="Folder for models, which all tables made there share, and reports.")
    ] = Path("reproduction"),
    data: Annotated[
        list[str] | None,
        typer.Option(help="Texts to train on, as of train; several times. With tiny, Python's own library if none."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Texts to test on, NAME=FILE; several times, the same name to put files together."),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between them.")] = "0,1,2",
    steps: Annotated[
        int | None, typer.Option(min=1, max=_MOST, help="Optimiser steps; the preset's by default.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=8, max=_MOST, help="l: tokens in a training example; the preset's by default.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="bytes, bpe:SIZE, or a folder or Hub id; the preset's by default.")
    ] = None,
    also: Annotated[
        list[str] | None, typer.Option(help="A further system, as sandwich, kerple+bca, rope+sliding; several times.")
    ] = None,
    segments: Annotated[
        int | None, typer.Option(min=1, help="Segments whose last tokens are scored; the preset's by default.")
    ] = None,
    device: Device = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be trained and measured.")] = False,
    as_json: Json = False,
) -> None:
    """Make a table or figure of the papers again: train what is missing, measure, compare, report.

    A run that was stopped goes on when the same command is given again; so does one that was killed.
    """
    from lex_hf.reproduce import running

    with _session(as_json) as console:
        request = running.Request(
            table=table,
            preset=preset,
            output=output,
            data=data or (),
            tests=test or (),
            seeds=_seeds(seeds),
            steps=steps,
            length=length,
            tokenizer=tokenizer,
            also=also or (),
            segments=segments,
            device=device,
        )
        if dry_run:
            result = running.Plan(request).to_dict()
            if not as_json:
                _print_reproduction(console, result)
        else:
            result = running.run(request, console=console)
    if as_json and _is_main_process():
        _print_json(result)


def _seeds(text: str) -> list[int]:
    """Whole numbers with commas or spaces between them."""
    words = text.replace(",", " ").split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"--seeds {text}: they must be whole numbers with commas between them, as 0,1,2.")
    return [int(word) for word in words]


def _print_reproduction(console: Console, plan: dict[str, Any]) -> None:
    """What would be trained, and then measured."""
    missing = [model for model in plan["models"] if model["state"] != "trained"]
    title = f"{plan['table']} at the scale {plan['preset']}, l = {plan['training_length']}"
    tokens = sum(model["tokens"] for model in missing)
    caption = f"{len(missing)} of {len(plan['models'])} models are to be trained, on {tokens} tokens together"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("systems", overflow="fold")
    for column in ("seed", "parameters", "steps", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for model in plan["models"]:
        numbers = (str(model[name]) for name in ("seed", "parameters", "steps", "tokens"))
        table.add_row(", ".join(model["systems"]), *numbers, model["state"])
    console.print(table)
    lengths = ", ".join(map(str, plan["lengths"]))
    console.print(
        f"Measured: {plan['measure']} at {lengths} tokens, of {len(plan['evaluations'])} systems, on "
        + (", ".join(texts["name"] for texts in plan["tests"]) or "no texts")
    )


@app.command()
def check(
    model: Model,
    text: Annotated[str | None, typer.Option(help="The text to try; by default one of 600 characters.")] = None,
    shift: Annotated[int, typer.Option(min=1, help="Tokens of padding or text put in front or behind.")] = 7,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Check order variance and translation invariance of a model (LEX paper, Eq. 1 and 2)."""
    from lex_hf.evaluation.checks import check_positions
    from lex_hf.evaluation.perplexity import load_for_evaluation

    with _session(as_json) as console:
        sample = "A block sees itself and the one before. " * 15 if text is None else _typed(text, "--text")
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        result = check_positions(lex, words(sample, return_tensors="pt")["input_ids"], shift=shift)
    if as_json:
        _print_json(vars(result))
        return
    table = Table(title=f"{model}: largest change of a logit")
    table.add_column("when")
    table.add_column("change", justify="right")
    table.add_column("so")
    shifted, longer = (
        "refused" if value is None else f"{value:.2e}" for value in (result.shifted_positions, result.text_in_front)
    )
    for row in (
        ("earlier tokens are permuted", f"{result.order_variance:.2e}", _says(result.is_order_variant, "knows order")),
        (f"{shift} tokens of padding stand in front", f"{result.left_padding:.2e}", ""),
        (f"{shift} tokens of padding stand behind", f"{result.right_padding:.2e}", ""),
        ("", "", _says(result.ignores_padding, "padding changes nothing")),
        (f"positions start at {shift}", shifted, _says(result.ignores_shifts, "positions are relative")),
        (f"{shift} tokens of text stand in front", longer, "a longer context"),
    ):
        table.add_row(*row)
    console.print(table)


Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a field, as NAME=VALUE; several times."),
]


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(help="gpt-medium, sandwich-162m, small, tiny, fine-tune, or the path of a recipe (.yaml)."),
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
        typer.Option(help="Of --resume: a setting that may be other than it was, as learning_rate; several times."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option(help="Replace the model, checkpoints and recipe.yaml in the output; all else is kept.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what it would take: parameters, tokens, memory, FLOPs.")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Of --dry-run: number of devices to plan for; those here by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on texts, as a recipe says; every field of it can be changed with --set.

    Ctrl-C saves a checkpoint first; the same command with --resume goes on from there. Under torchrun or accelerate
    launch all processes train one model.
    """
    from lex_hf.training import recipes

    with _session(as_json) as console:
        plan = _recipe_to_train(recipes.load_recipe(recipe), model, tokenizer, assignments or [])
        if dry_run:
            config = _planned_config(plan, model)
            plan.check_training()
            told, text = plan.estimate(config, processes), plan.to_yaml(None if model else config)
    if dry_run:
        if as_json:
            _print_json(told.to_dict() | {"recipe": text})
        elif _is_main_process():
            _print_training_plan(console, plan.name, told, text)
        return
    with _session(as_json):
        sources = [*(data or []), *(files or [])]
        if output is None or not sources:
            raise ValueError("A training needs texts and a folder: --data FILES --output DIR.")
        rules = {"resume": resume, "allow_changes": allow_change or [], "overwrite": overwrite}
        result = _train(console, plan, sources, eval_data or [], output, model, rules)
        if not _is_main_process():
            return
    if as_json:
        _print_json(result.to_dict())
    else:
        console.print(
            f"{result.steps} steps, {result.tokens} tokens, mean loss {result.train_loss:.4f} nats per token; "
            f"the model is in {result.model_folder}"
        )


@app.command("tokenizer")
def tokenizer_command(
    files: Files,
    output: Annotated[Path, typer.Option(help="Folder for the tokenizer; a new one.")],
    vocab_size: Annotated[int, typer.Option(min=257, help="Number of tokens.")] = 8192,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Train a byte-level BPE tokenizer, the kind of GPT-2; texts may be larger than memory."""
    from lex_hf.data.documents import stream_documents
    from lex_hf.data.tokenization import train_tokenizer

    with _session(as_json) as console:
        check_new_folder(output, "--output")
        texts = (document["text"] for document in stream_documents(files, text_field=text_field))
        words = train_tokenizer(texts, vocab_size)
        _save_folder(output, words)
    if as_json:
        _print_json({"tokens": len(words), "folder": str(output)})
    else:
        console.print(f"{len(words)} tokens; the tokenizer is in {output}")


@app.command("warm-start")
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

    --set takes the fields of LexConfig, as --set training_length=512.
    """
    from lex_hf.convert.gpt2 import from_gpt2
    from lex_hf.convert.torchscale import from_torchscale
    from lex_hf.training import recipes

    with _session(as_json) as console:
        check_new_folder(output, "OUTPUT")
        fields = recipes.model_fields(assignments or [])
        is_file = Path(source).is_file()
        lex = from_torchscale(source, **fields) if is_file else from_gpt2(source, **fields)
        name = (None if is_file else source) if tokenizer is None else tokenizer
        words = None if name is None else recipes.load_tokenizer(name)
        if words is not None and len(words) > lex.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(words)} tokens, but the model vocab_size = {lex.config.vocab_size}."
            )
        _save_folder(output, *filter(None, (words, lex)))
    count = sum(parameter.numel() for parameter in lex.parameters())
    if as_json:
        _print_json({"parameters": count, "tokenizer": name, "folder": str(output)})
    else:
        console.print(f"{count} parameters; the model is in {output}")


@app.command()
def evaluate(
    model: Model,
    files: Files,
    protocol: Protocol = "chunked",
    length: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens in a segment, window or chunk; give it several times for a table."),
    ] = None,
    stride: Stride = None,
    contexts: Contexts = None,
    batch_size: BatchSize = "8",
    start_token: StartToken = True,
    records: Records = None,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    csv: Annotated[Path | None, typer.Option(help="Write the table to this file, unrounded.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw perplexity against length to this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Measure perplexity on texts, at one length or several.

    Under torchrun or accelerate launch the texts are shared out between the processes.
    """
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation, protocol_options

    with _session(as_json) as console:
        _check_plot(plot, length)
        _check_files(files, csv=csv, plot=plot, records=records)
        _check_records(records)
        size = _batch_size(batch_size)
        for each in length or ():
            protocol_options(protocol, each, stride=stride, contexts=contexts)
        texts = list(load_documents(files, text_field=text_field)["text"])
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        known = None if plot is None else _known_length(model, lex.config)
        results_by_length = {
            each: compute_perplexity(
                lex,
                words,
                texts,
                protocol=protocol,
                length=each,
                stride=stride,
                contexts=contexts,
                batch_size=size,
                add_start_token=start_token,
                records=records,
            )
            for each in (sorted(set(length), reverse=True) if length else [None])  # what is too long fails first
        }
        results = [results_by_length[each] for each in length] if length else [*results_by_length.values()]
        if not _is_main_process():
            return
        rows = [row for result in results for row in _perplexity_rows(result)]

    def show() -> None:
        if as_json:
            _print_json([result.to_dict() for result in results])
        else:
            console.print(_perplexity_table(f"{model}: {len(texts)} texts, {protocol}", rows))

    _print_after(
        show,
        lambda: None if csv is None else _write_csv(csv, rows),
        lambda: None if plot is None or known is None else _plot_perplexity(plot, model, known, results),
    )


@app.command()
def compare(
    model_a: Annotated[str, typer.Argument(help="Folder or Hub id of model A with its tokenizer.")],
    model_b: Annotated[str, typer.Argument(help="The same of model B; it may be the same model.")],
    files: Files,
    protocol: Protocol = "chunked",
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a segment, window or chunk; A's training length by default.")
    ] = None,
    stride: Stride = None,
    batch_size: BatchSize = "8",
    start_token: StartToken = True,
    records: Records = None,
    attention_pattern: Annotated[
        list[str] | None,
        typer.Option(help="blockwise, sliding or full; twice for A and for B, once for both."),
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Compare two models on the same texts, paired by text: t-test, bootstrap interval, ratio of perplexities."""
    from lex_hf.data.documents import load_documents
    from lex_hf.evaluation import comparison
    from lex_hf.evaluation.loading import check_model
    from lex_hf.evaluation.perplexity import compute_perplexity, load_for_evaluation

    with _session(as_json) as console:
        patterns = _two_patterns(attention_pattern)
        _check_files(files, records=records)
        _check_records(records)
        size = _batch_size(batch_size)
        texts = list(load_documents(files, text_field=text_field)["text"])
        for model, pattern in zip((model_a, model_b), patterns, strict=True):  # both, before one is measured
            check_model(model, trust_remote_code=trust_remote_code, **_pattern(pattern))
        comparison.check_pairs(len(texts))
        results: list[Any] = []
        for model, pattern in zip((model_a, model_b), patterns, strict=True):
            lex, words = load_for_evaluation(
                model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(pattern)
            )
            result = compute_perplexity(
                lex,
                words,
                texts,
                protocol=protocol,
                length=results[0].length if results else length,
                stride=stride,
                batch_size=size,
                add_start_token=start_token,
                records=records,
            )
            results.append(result)
    if not _is_main_process():
        return
    both = dict(zip("ab", (result.to_dict() for result in results), strict=True))
    rows = [{"model": name} | _perplexity_rows(result)[-1] for name, result in zip("AB", results, strict=True)]
    if not as_json:  # also if they do not compare, as with different tokenizers
        console.print(_perplexity_table(f"A: {model_a}, B: {model_b}: {len(texts)} texts, {protocol}", rows))
    paired = comparison.compare(*results)
    if as_json:
        _print_json({**paired.to_dict(), **both})
    else:
        _print_comparison(console, paired)


Length = Annotated[int, typer.Option(min=2, help="Tokens of a segment.")]
Segments = Annotated[int, typer.Option(min=1, help="Number of segments, taken from the beginnings of the texts.")]
Patterns = Annotated[
    list[str] | None,
    typer.Option("--attention-pattern", help="blockwise, sliding or full; several times to compare them."),
]
Output = Annotated[Path | None, typer.Option(help="Folder for the numbers (JSON) and pictures (PNG).")]


@app.command()
def resolution(
    model: Model,
    files: Files,
    length: Length = 1024,
    segments: Segments = 4,
    reading: Annotated[str, typer.Option(help="A, B or C: readings of Eq. 4 at the end of the curve.")] = "A",
    attention_pattern: Patterns = None,
    output: Output = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Measure attention resolution, layer by layer (LEX paper, Eq. 3, 4, 13)."""
    import torch

    from lex_hf.evaluation import plots
    from lex_hf.evaluation.resolution import attention_resolution, measure_resolution

    with _session(as_json) as console:
        _check_patterns(attention_pattern)
        _check_measurements(output, "resolution", *(f"curves-{name}" for name in attention_pattern or ()))
        attention_resolution(torch.tensor([1.0, 0.0]), reading=cast(Any, reading))  # fails before any work
        results = {
            name: measure_resolution(lex, ids, reading=cast(Any, reading))
            for name, lex, ids in _models_and_segments(
                model, files, length, segments, attention_pattern, device, dtype, trust_remote_code, text_field
            )
        }
    table = Table(title=f"{model}: attention resolution at {length} tokens")
    for column in ("layer", *results):
        table.add_column(column, justify="right")
    columns = [[*result.by_layer, result.mean] for result in results.values()]
    for layer, row in enumerate(zip(*columns, strict=True)):
        table.add_row("mean" if layer == len(columns[0]) - 1 else str(layer), *(f"{value:.4f}" for value in row))
    title = f"{model}: resolution at {length} tokens"
    pictures = {"resolution": lambda: plots.resolution_by_layer(results, title=title)} | {
        f"curves-{name}": result.plot for name, result in results.items()
    }
    _show_measurements(console, as_json, table, output, "resolution", results, pictures)


@app.command()
def receptive_field(
    model: Model,
    files: Files,
    length: Length = 1024,
    segments: Segments = 4,
    threshold: Annotated[
        float, typer.Option(callback=_finite, help="Share of the gradient that the tokens counted hold.")
    ] = 0.99,
    batch_size: Annotated[int, typer.Option(min=1, help="Segments at once.")] = 1,
    attention_pattern: Patterns = None,
    output: Output = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Measure how many tokens act on a prediction (arXiv 2212.10356, section 5.1)."""
    from lex_hf.evaluation import plots
    from lex_hf.evaluation.receptive_field import receptive_field as measure

    with _session(as_json) as console:
        _check_patterns(attention_pattern)
        _check_measurements(output, "receptive-field")
        results = {
            name: measure(lex, ids, threshold=threshold, batch_size=batch_size)
            for name, lex, ids in _models_and_segments(
                model, files, length, segments, attention_pattern, device, dtype, trust_remote_code, text_field
            )
        }
    table = Table(title=f"{model}: receptive field, {segments} segments of {length} tokens")
    for column in ("pattern", f"empirical ({threshold:g})", "theoretical"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        theoretical = "the whole text" if result.theoretical is None else str(result.theoretical)
        table.add_row(name, str(result.erf), theoretical)
    title = f"{model}: what acts on the prediction after {length} tokens"
    pictures = {"receptive-field": lambda: plots.receptive_fields(results, title=title)}
    _show_measurements(console, as_json, table, output, "receptive-field", results, pictures)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=_MOST, help="Tokens to generate.")] = 200,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token instead of sampling.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, callback=_finite, help="Temperature of sampling.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, callback=_finite, help="Nucleus of sampling.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of sampling.")] = 0,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a text, of any length, in constant memory; the text appears as it is written."""
    from transformers import TextStreamer, set_seed

    from lex_hf.evaluation.perplexity import load_for_evaluation

    with _session(as_json):
        beginning = _standard_input() if prompt == "-" else _typed(prompt, "PROMPT")
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        inputs = _prompt(beginning, words).to(lex.device)
        largest, size = int(inputs["input_ids"].max()), lex.get_input_embeddings().weight.shape[0]
        if largest >= size:
            raise ValueError(
                f"The prompt holds the token id {largest}, but the vocabulary of {model} has {size} ids: use the "
                "tokenizer the model was trained with."
            )
        set_seed(seed)
        sampling = {} if greedy else {"temperature": temperature, "top_p": top_p}
        try:
            output = lex.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=not greedy,
                streamer=None if as_json else TextStreamer(words),
                return_dict_in_generate=True,
                **sampling,
            )
        except IndexError as error:  # of models whose positions are a table
            raise ValueError(f"{model} cannot read so many tokens ({error}): choose fewer.") from error
    if as_json:
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        _print_json({"text": words.decode(tokens), "tokens": tokens})


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved model with its tokenizer and model card.")],
    repo_id: Annotated[str, typer.Argument(help="Repository, as user/name; it is made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", "--branch", help="Branch, made if it does not exist; main by default.")
    ] = None,
    message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload model",
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be sent and what not.")] = False,
    as_json: Json = False,
) -> None:
    """Push a saved model to the Hub in one commit: weights, code, tokenizer, card, pictures.

    Checkpoints, training states, logs, pickles and hidden files stay. Log in first with `hf auth login`.
    """
    from lex_hf.hub import push as hub

    with _session(as_json) as console, hub.plain_errors(repo_id):
        if dry_run:
            files = hub.examine_folder(folder)
            if not as_json:
                console.print(_files_table(f"{folder} to {repo_id}", files))
            hub.check_push(folder, repo_id, revision=revision, create_pr=create_pr)
            result: dict[str, Any] = {"files": [vars(file) for file in files]}
        else:
            commit = hub.push_folder(
                folder, repo_id, private=private, revision=revision, message=message, create_pr=create_pr
            )
            result = {"commit": commit.oid, "url": commit.pr_url or commit.commit_url}
            console.print(f"Pushed: {result['url']}", soft_wrap=True)
    if as_json:
        _print_json(result)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve a model over HTTP, for `transformers chat` and OpenAI's clients; Ctrl-C ends it.

    All further options, after MODEL, are those of `transformers serve`, which `transformers serve --help` explains;
    needs pip install 'transformers[serving]'.
    """
    from lex_hf.inference import serve as server

    with _session():
        server.serve(model, host=host, port=port, options=context.args)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    about: Annotated[Path | None, typer.Option(help="YAML with what only the maker knows (`About`).")] = None,
    test: Annotated[
        list[str] | None, typer.Option(help="CORPUS=FILE to measure it on; several times, also for one corpus.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in a segment; several times.")] = None,
    characters: Annotated[int | None, typer.Option(min=1, help="Characters from the beginning of each text.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=_LARGEST_SEED, help="Seed of the samples.")] = 0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a README.md that this command did not write.")
    ] = False,
) -> None:
    """Write the model card of a model from its record; with --about and --test, measure it first."""
    from lex_hf.hub import card as cards

    with _session() as console:
        if (about is None) != (not test):
            raise ValueError("--about and --test belong together: what the maker knows, and texts to measure on.")
        if about is not None:
            cards.measure(
                folder,
                cards.About.read(about),
                _corpora(test or []),
                length or [],
                characters=characters,
                command=shlex.join(["lex-hf", *sys.argv[1:]]),
                seed=seed,
                overwrite=overwrite,
            )
        console.print(f"The card is in {cards.write_card(folder, overwrite=overwrite)}", soft_wrap=True)


def _corpora(pairs: list[str]) -> dict[str, list[str]]:
    """Read CORPUS=FILE, several times."""
    corpora: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (name and equals and file):
            raise ValueError(f"--test {pair}: it must be CORPUS=FILE.")
        corpora.setdefault(name, []).append(file)
    return corpora


def _files_table(title: str, files: list[Any]) -> Table:
    """What a push sends, with sizes, and below a line what stays, with the reasons."""
    from rich.filesize import decimal

    sent = [file for file in files if file.sent]
    total = decimal(sum(file.size for file in sent))
    caption = f"{len(sent)} files, {total}, would be sent; the rest stays."
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("sent", no_wrap=True)
    table.add_column("what, or why not")
    for file in files:
        table.add_row(file.path, decimal(file.size), "yes" if file.sent else "no", file.what)
    return table


def _prompt(text: str, tokenizer: Any) -> Any:
    """Tokenise a prompt; an empty one begins with the start token."""
    inputs = tokenizer(text or tokenizer.bos_token or "", return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The prompt is empty, and the tokenizer has no start token: give at least one character.")
    return inputs


def _typed(text: str, name: str) -> str:
    """Refuse what was typed in another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text, from character {error.start + 1} on: convert it.") from error
    return text


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueError("There is no standard input to read the prompt from.")
    content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The standard input is not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start}: "
            "convert it."
        ) from error


def _batch_size(text: str) -> Any:
    """A number of windows, or auto."""
    from lex_hf.evaluation.perplexity import check_batch_size

    size = int(text) if text.isdecimal() else text
    check_batch_size(size)
    return size


def _is_main_process() -> bool:
    """Whether this process is the one that prints and writes, under a launcher of several."""
    from accelerate import PartialState

    return PartialState().is_main_process


def _perplexity_rows(result: Any) -> list[dict[str, Any]]:
    """Rows of a table: one, or under `last_token` one for each context, of which the last has all the numbers."""
    low, high = result.confidence_interval or (None, None)
    numbers = {"perplexity": result.perplexity, "low": low, "high": high, "bits/byte": result.bits_per_byte}
    rows = [{"length": result.length, "tokens": result.tokens, "nats/token": result.nll} | numbers]
    if result.protocol != "last_token":
        return rows
    empty = dict.fromkeys(numbers)
    return [
        {"length": result.length, "context": each.start, "tokens": each.tokens, "nats/token": each.nll}
        | (empty | {"perplexity": each.perplexity} if each.start < result.options["contexts"][-1] else numbers)
        for each in result.loss_by_position
    ]


def _perplexity_table(title: str, rows: list[dict[str, Any]]) -> Table:
    caption = "low and high: 95 % interval of the perplexity, from a bootstrap over texts"
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in rows[0]:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:#.5g}" if isinstance(value, float) else str(value)


def _print_comparison(console: Console, paired: Any) -> None:
    low, high = paired.confidence_interval
    console.print(
        f"A minus B: {paired.difference:+.4f} nats per token, mean over {paired.n} texts "
        f"(95 % interval {low:+.4f} to {high:+.4f}); ratio of perplexities {paired.perplexity_ratio:.4f}",
        f"paired two-sided t-test: p = {paired.p_value:.3g}, {paired.verdict}",
        sep="\n",
    )


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows under their names; the file appears only when it is whole."""
    from csv import DictWriter

    with whole_file(path) as place, place.open("w", encoding="utf-8", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _check_plot(path: Path | None, lengths: list[int] | None) -> None:
    if path is not None and len(set(lengths or ())) < 2:
        raise ValueError("--plot draws perplexity against length: give --length at least twice.")


def _check_files(sources: list[str], **files: Path | None) -> None:
    """Check the files of options before any work: each can be written, and nothing that is needed is replaced."""
    taken = {Path(source).resolve(): source for source in sources}
    for option, path in files.items():
        if path is None:
            continue
        check_file(path, f"--{option}")
        other = taken.setdefault(path.resolve(), f"--{option}")
        if other != f"--{option}" and (path.is_file() or not path.exists()):
            raise ValueError(f"--{option} {path} is the same file as {other}: choose another path.")


def _check_records(path: Path | None) -> None:
    if path is not None and path.exists() and not path.is_file():
        raise ValueError(f"--records {path} is no regular file: what is written there cannot be read again.")


def _known_length(model: str, config: Any) -> int:
    known = getattr(config, "training_length", None) or getattr(config, "max_position_embeddings", None)
    if known is None:
        raise ValueError(f"--plot marks the training length, but the configuration of {model} does not tell it.")
    return int(known)


def _plot_perplexity(path: Path, model: str, known: int, results: list[Any]) -> None:
    from lex_hf.evaluation import plots

    ordered = sorted(results, key=lambda result: result.length)
    curve = {result.length: result.perplexity for result in ordered}
    intervals = {result.length: result.confidence_interval for result in ordered if result.confidence_interval}
    bands = {model: intervals} if intervals else None  # of a single text there are none
    title = f"{model}, {results[0].protocol}"
    plots.save(plots.perplexity_by_length({model: curve}, known, title=title, intervals=bands), path)


def _check_patterns(names: list[str] | None) -> None:
    from lex_hf.model.configuration_lex import ATTENTION_PATTERNS

    for name in names or ():
        if name not in ATTENTION_PATTERNS:
            raise ValueError(f"attention_pattern = {name!r}: it must be one of {', '.join(ATTENTION_PATTERNS)}.")


def _models_and_segments(
    model: str,
    files: list[str],
    length: int,
    count: int,
    patterns: list[str] | None,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool,
    text_field: str,
) -> Iterator[tuple[str, Any, Any]]:
    """The model with each attention pattern, under its name, and segments of the texts as token ids."""
    from lex_hf.data.documents import load_documents, tokenize_documents
    from lex_hf.evaluation.perplexity import load_for_evaluation

    texts = load_documents(files, text_field=text_field)
    chosen: list[str | None] = [*patterns] if patterns else [None]
    for pattern in chosen:
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(pattern)
        )
        ids = _segments(tokenize_documents(texts, words)["input_ids"], length, count)
        yield pattern or str(getattr(lex.config, "attention_pattern", lex.config.model_type)), lex, ids


def _segments(documents: Any, length: int, count: int) -> Any:
    """Take segments from the texts in turn, first the beginnings, until there are enough."""
    import torch

    starts = range(0, max(map(len, documents)), length)
    whole = [text[start : start + length] for start in starts for text in documents if start + length <= len(text)]
    if len(whole) < count:
        raise ValueError(
            f"The texts hold {len(whole)} segments of {length} tokens, {count} are asked for: give more text, or a "
            "smaller --length or --segments."
        )
    return torch.tensor(whole[:count])


def _check_measurements(folder: Path | None, *names: str) -> None:
    """Check, before any work, that numbers and pictures can be written."""
    if folder is None:
        return
    check_folder(folder, "--output")
    for file in (f"{names[0]}.json", *(f"{name}.png" for name in names)) if folder.is_dir() else ():
        check_file(folder / file, "--output:")


def _show_measurements(
    console: Console,
    as_json: bool,
    table: Table,
    folder: Path | None,
    name: str,
    results: dict[str, Any],
    pictures: dict[str, Callable[[], Any]],
) -> None:
    """Write numbers and pictures, each under its name only when it is whole, and print the numbers."""
    from lex_hf.evaluation import plots

    numbers = {key: result.to_dict() for key, result in results.items()}

    def write(folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{name}.json", to_json(numbers) + "\n")
        for title, draw in pictures.items():
            plots.save(draw(), folder / f"{title}.png")

    _print_after(
        lambda: _print_json(numbers) if as_json else console.print(table),
        lambda: None if folder is None else write(folder),
    )


def _two_patterns(names: list[str] | None) -> list[str | None]:
    patterns: list[str | None] = [*names] if names else [None]
    if len(patterns) > 2:
        raise ValueError(f"--attention-pattern is given {len(patterns)} times: once for both models, or twice.")
    return [patterns[0], patterns[-1]]


def _says(holds: bool, what: str) -> str:
    return what if holds else f"not: {what}"


def _pattern(name: str | None) -> dict[str, str]:
    return {} if name is None else {"attention_pattern": name}


def _recipe_to_train(recipe: Any, model: str | None, tokenizer: str | None, assignments: list[str]) -> Any:
    """The recipe with what the command line changes; a model that is there has a description of its own."""
    from dataclasses import replace

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


def _train(
    console: Console,
    plan: Any,
    sources: list[str],
    eval_sources: list[str],
    output: Path,
    model: str | None,
    rules: dict[str, Any],
) -> Any:
    """Train as planned, and leave the recipe with the model; `rules` say what may be resumed or replaced."""
    from transformers import set_seed

    from lex_hf import LexForCausalLM
    from lex_hf.evaluation.perplexity import load_for_evaluation
    from lex_hf.training import trainer as training
    from lex_hf.training.run_folder import RECIPE_NAME, claimed

    check_folder(output, "--output")
    # First: they find the processes of a launcher and their devices, which loading a model would settle otherwise.
    arguments = plan.arguments(output)
    training.check_arguments(arguments, rules["resume"], rules["allow_changes"])
    with claimed(arguments, resume=rules["resume"], overwrite=rules["overwrite"], also=[RECIPE_NAME]):
        examples_of = _packing(plan, sources, arguments.seed)
        set_seed(arguments.seed)
        if model is not None:
            lex, words = load_for_evaluation(model, device="cpu")
        else:
            words = plan.tokenizer()
            lex = LexForCausalLM(plan.config(words))
        length = plan.length(lex.config)
        held_back = None
        if eval_sources:
            held_back = _packing(plan, eval_sources, arguments.seed, in_memory=True)(words, length)
        examples = examples_of(words, length)
        if arguments.process_index == 0:
            step = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps * length
            size = f"{lex.num_parameters()} parameters, {step} tokens a step, {arguments.world_size} processes"
            console.print(f"{plan.name}: {size}")

        def keep_recipe(changes: list[Any]) -> None:
            text = plan.to_yaml(None if model else lex.config, changes)
            write_text(Path(arguments.output_dir) / RECIPE_NAME, text)

        return training.train(lex, words, examples, arguments, eval_dataset=held_back, on_save=keep_recipe, **rules)


def _packing(plan: Any, sources: list[str], seed: int, *, in_memory: bool = False) -> Any:
    """Find the documents now, so that what is not there is known at once; pack them when there is a tokenizer."""
    from lex_hf.data.documents import load_documents, pack, stream_documents
    from lex_hf.data.streaming import PackedStream

    options = {"text_field": plan.data.text_field, "split": plan.data.split}
    apart = plan.data.separate_documents
    if plan.data.streaming and not in_memory:
        stream = stream_documents(sources, **options)
        return lambda words, length: PackedStream(
            stream,
            words,
            length,
            separate_documents=apart,
            shuffle_buffer=plan.data.shuffle_buffer,
            seed=seed,
            sources=sources,
        )
    documents = load_documents(sources, **options)
    return lambda words, length: pack(documents, words, length, separate_documents=apart)


def _planned_config(plan: Any, model: str | None) -> Any:
    """The configuration of the model to train; no weights are loaded, and no tokenizer if the recipe has no need."""
    from transformers import AutoConfig

    from lex_hf import LexConfig

    if model is None:
        return plan.config(None if "vocab_size" in plan.model else plan.tokenizer())
    config = AutoConfig.from_pretrained(model)
    if not isinstance(config, LexConfig):
        raise ValueError(f"--dry-run knows LEX models only; {model} is of type {config.model_type!r}.")
    return config


def _print_training_plan(console: Console, name: str, told: Any, text: str) -> None:
    """Print what a training would take, and the recipe with all that was changed."""
    from lex_hf.training.estimate import HOW_MEMORY_IS_ESTIMATED

    table = Table(title=f"{name}: what it takes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("what", overflow="fold")
    table.add_column("how much", justify="right", no_wrap=True)
    for row in _training_plan_rows(told):
        table.add_row(*row)
    console.print(table)
    console.print(f"Memory. {HOW_MEMORY_IS_ESTIMATED}", "", text, sep="\n")


def _training_plan_rows(told: Any) -> list[tuple[str, str]]:
    memory = told.memory
    rows: list[tuple[str, int | None, str]] = [
        ("parameters", told.parameters, "{:,}"),
        ("of these no embeddings", told.parameters_without_embeddings, "{:,}"),
        ("devices", told.devices, "{:,}"),
        ("examples that a device takes at once", told.batch_size, "{:,}"),
        ("batches that a device takes for a step", told.accumulation, "{:,}"),
        ("tokens per step, over all devices", told.tokens_per_step, "{:,}"),
        ("steps", told.steps, "{:,}"),
        ("tokens", told.tokens, "{:,}"),
        ("floating-point operations, 6 N T + attention", told.flops, "{:.3g}"),
        ("memory of a device: weights", memory.weights, "GiB"),
        ("gradients", memory.gradients, "GiB"),
        ("optimiser", memory.optimizer, "GiB"),
        ("activations", memory.activations, "GiB"),
        ("together", memory.total, "GiB"),
    ]
    return [(name, _amount(value, form)) for name, value, form in rows]


def _amount(value: int | None, form: str) -> str:
    if value is None:
        return "not known"
    return f"{value / 2**30:.2f} GiB" if form == "GiB" else form.format(value)


def _save_folder(folder: Path, *parts: Any) -> None:
    """Save what has a `save_pretrained`; the folder appears only when it is whole."""
    from lex_hf.evaluation.loading import plain

    try:
        with whole_folder(folder) as partial:
            for part in parts:
                part.save_pretrained(partial)
    except Exception as error:  # of a full disk, tokenizers and safetensors raise errors of their own
        raise OSError(f"{folder} cannot be written, nothing is left of it: {plain(error)}") from error


@contextlib.contextmanager
def _session(as_json: bool = False) -> Iterator[Console]:
    """Keep standard output free for JSON, where libraries print."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield plain_console(stderr=as_json)


def _print_json(value: Any) -> None:
    print(to_json(value))  # noqa: T201


def _print_after(printing: Callable[[], None], *writing: Callable[[], None]) -> None:
    """Write results and print them; each is done whatever becomes of the others, printing last."""
    with contextlib.ExitStack() as stack:
        for each in (printing, *reversed(writing)):
            stack.callback(each)

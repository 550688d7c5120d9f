"""The command line: parse, call one function of the Python API, print."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

import typer
from huggingface_hub.errors import StrictDataclassError
from rich import box
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError

app = typer.Typer(
    help="Length-Extrapolatable Transformers: train on short texts, read and write long ones.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its columns cut option names short in a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="Folder or Hub id of a model with its tokenizer.")]
Files = Annotated[
    list[str],
    typer.Argument(help="Text files, JSON lines (.jsonl, .jsonl.gz), folders of them, or names of Hub datasets."),
]
TextField = Annotated[str, typer.Option(help="Field or column that holds the text.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to standard error.")]
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
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps for each of the two models.")] = 1500,
    generate: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 2000,
) -> None:
    """Train a tiny LEX on Python's own library, evaluate it at 16 times its training length, generate."""
    from lex_hf import demo as story

    with _session() as console:
        story.run(output, steps=steps, generate=generate, console=console)


@app.command()
def extrapolation(
    output: Annotated[Path, typer.Option(help="Folder for models, table, plot and JSON; used again if it exists.")],
    scheme: Annotated[list[str] | None, typer.Option(help="A position scheme; all of them by default.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="A seed; 0 and 1 by default.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each model.")] = 1500,
) -> None:
    """Train a tiny model for each position scheme and compare them at up to 16 times the training length."""
    from lex_hf import extrapolation as comparison
    from lex_hf.positions_lex import SCHEMES

    with _session() as console:
        comparison.run(output, schemes=scheme or tuple(SCHEMES), seeds=seed or (0, 1), steps=steps, console=console)


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
    from lex_hf.checks import check_positions
    from lex_hf.perplexity import load_for_evaluation

    with _session(as_json) as console:
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        sample = "A block sees itself and the one before. " * 15 if text is None else text
        result = check_positions(lex, words(sample, return_tensors="pt")["input_ids"], shift=shift)
    if as_json:
        print(json.dumps(vars(result)))  # noqa: T201
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


@app.command()
def train(
    files: Files,
    output: Annotated[Path, typer.Option(help="Folder for checkpoints and the trained model.")],
    model: Annotated[
        str | None, typer.Option(help="Folder or Hub id to fine-tune; without it, a new model is trained.")
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(help="Tokenizer of a new model: a folder or Hub id, or 'bytes' (one token per byte).")
    ] = "bytes",
    config: Annotated[
        list[str] | None,
        typer.Option("--config", "-c", help="A field of LexConfig for a new model, as num_hidden_layers=6."),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="l: tokens in a training example; even.")] = 1024,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 50_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step and device.")] = 8,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 3e-4,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")] = 0,
    save_steps: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of weights and of the order of examples.")] = 0,
    bf16: Annotated[bool, typer.Option(help="Mixed precision with bfloat16.")] = False,
    activation_checkpointing: Annotated[bool, typer.Option(help="Less memory for more time.")] = False,
    resume: Annotated[bool, typer.Option(help="Continue from the last complete checkpoint in the output.")] = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Train on texts that are packed into examples of equal length.

    Ctrl-C saves a checkpoint first; the same command with --resume goes on from there.
    """
    from lex_hf import training
    from lex_hf.data import load_documents, pack

    with _session(as_json) as console:
        documents = load_documents(files, text_field=text_field)
        lex, words = _model_to_train(model, tokenizer, config or [], length, seed)
        arguments = training.training_arguments(
            output,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            warmup_steps=warmup_steps,
            save_steps=save_steps,
            seed=seed,
            bf16=bf16,
            activation_checkpointing=activation_checkpointing,
        )
        result = training.train(lex, words, pack(documents, words, length), arguments, resume=resume)
    if as_json:
        print(json.dumps({**vars(result), "model_folder": str(result.model_folder)}))  # noqa: T201
    else:
        console.print(
            f"{result.steps} steps, {result.tokens} tokens, mean loss {result.train_loss:.4f} nats per token; "
            f"the model is in {result.model_folder}"
        )


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
    from lex_hf.data import load_documents
    from lex_hf.perplexity import compute_perplexity, load_for_evaluation

    with _session(as_json) as console:
        _check_plot(plot, length)
        texts = list(load_documents(files, text_field=text_field)["text"])
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        lengths: list[int | None] = [*length] if length else [None]
        results = [
            compute_perplexity(
                lex,
                words,
                texts,
                protocol=protocol,
                length=each,
                stride=stride,
                contexts=contexts,
                batch_size=_batch_size(batch_size),
                add_start_token=start_token,
                records=records,
            )
            for each in lengths
        ]
        if not _is_main_process():
            return
        rows = [row for result in results for row in _perplexity_rows(result)]
        if csv is not None:
            _write_csv(csv, rows)
        if plot is not None:
            _plot_perplexity(plot, model, lex.config, results)
    if as_json:
        print(json.dumps([result.to_dict() for result in results]))  # noqa: T201
    else:
        console.print(_perplexity_table(f"{model}: {len(texts)} texts, {protocol}", rows))


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
    from lex_hf import comparison
    from lex_hf.data import load_documents
    from lex_hf.perplexity import compute_perplexity, load_for_evaluation

    with _session(as_json) as console:
        patterns = _two_patterns(attention_pattern)
        texts = list(load_documents(files, text_field=text_field)["text"])
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
                batch_size=_batch_size(batch_size),
                add_start_token=start_token,
                records=records,
            )
            results.append(result)
        paired = comparison.compare(*results)
        if not _is_main_process():
            return
    if as_json:
        both = dict(zip("ab", (result.to_dict() for result in results), strict=True))
        print(json.dumps({**paired.to_dict(), **both}))  # noqa: T201
        return
    rows = [{"model": name} | _perplexity_rows(result)[-1] for name, result in zip("AB", results, strict=True)]
    console.print(_perplexity_table(f"A: {model_a}, B: {model_b}: {len(texts)} texts, {protocol}", rows))
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
    from lex_hf import plots
    from lex_hf.resolution import measure_resolution

    with _session(as_json) as console:
        results = {
            name: measure_resolution(lex, ids, reading=cast(Any, reading))
            for name, lex, ids in _models_and_segments(
                model, files, length, segments, attention_pattern, device, dtype, trust_remote_code, text_field
            )
        }
        figure = plots.resolution_by_layer(results, title=f"{model}: resolution at {length} tokens")
        pictures = {"resolution": figure} | {f"curves-{name}": result.plot() for name, result in results.items()}
        _write_measurements(output, "resolution", results, pictures)
    if as_json:
        print(json.dumps({name: result.to_dict() for name, result in results.items()}))  # noqa: T201
        return
    table = Table(title=f"{model}: attention resolution at {length} tokens")
    for column in ("layer", *results):
        table.add_column(column, justify="right")
    columns = [[*result.by_layer, result.mean] for result in results.values()]
    for layer, row in enumerate(zip(*columns, strict=True)):
        table.add_row("mean" if layer == len(columns[0]) - 1 else str(layer), *(f"{value:.4f}" for value in row))
    console.print(table)


@app.command()
def receptive_field(
    model: Model,
    files: Files,
    length: Length = 1024,
    segments: Segments = 4,
    threshold: Annotated[float, typer.Option(help="Share of the gradient that the tokens counted hold.")] = 0.99,
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
    from lex_hf import plots
    from lex_hf.receptive_field import receptive_field as measure

    with _session(as_json) as console:
        results = {
            name: measure(lex, ids, threshold=threshold, batch_size=batch_size)
            for name, lex, ids in _models_and_segments(
                model, files, length, segments, attention_pattern, device, dtype, trust_remote_code, text_field
            )
        }
        figure = plots.receptive_fields(results, title=f"{model}: what acts on the prediction after {length} tokens")
        _write_measurements(output, "receptive-field", results, {"receptive-field": figure})
    if as_json:
        print(json.dumps({name: result.to_dict() for name, result in results.items()}))  # noqa: T201
        return
    table = Table(title=f"{model}: receptive field, {segments} segments of {length} tokens")
    for column in ("pattern", f"empirical ({threshold:g})", "theoretical"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        theoretical = "the whole text" if result.theoretical is None else str(result.theoretical)
        table.add_row(name, str(result.erf), theoretical)
    console.print(table)


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token instead of sampling.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="Temperature of sampling.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus of sampling.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    attention_pattern: Pattern = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a text, of any length, in constant memory; the text appears as it is written."""
    from transformers import TextStreamer, set_seed

    from lex_hf.perplexity import load_for_evaluation

    with _session(as_json):
        lex, words = load_for_evaluation(
            model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **_pattern(attention_pattern)
        )
        inputs = _prompt(sys.stdin.read() if prompt == "-" else prompt, words).to(lex.device)
        set_seed(seed)
        sampling = {} if greedy else {"temperature": temperature, "top_p": top_p}
        output = lex.generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            streamer=None if as_json else TextStreamer(words),
            return_dict_in_generate=True,
            **sampling,
        )
    if as_json:
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        print(json.dumps({"text": words.decode(tokens), "tokens": tokens}))  # noqa: T201


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
    from lex_hf import hub

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
            console.print(f"Pushed: {result['url']}", soft_wrap=True, highlight=False)
    if as_json:
        print(json.dumps(result))  # noqa: T201


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
    from lex_hf import serve as server

    with _session():
        try:
            server.serve(model, host=host, port=port, options=context.args)
        except ImportError as error:
            _fail(f"Error: {error}", 1)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a trained model.")],
    about: Annotated[Path | None, typer.Option(help="YAML with what only the maker knows, lex_hf.card.About.")] = None,
    test: Annotated[
        list[str] | None, typer.Option(help="CORPUS=FILE to measure it on; several times, also for one corpus.")
    ] = None,
    length: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in a segment; several times.")] = None,
    characters: Annotated[int | None, typer.Option(min=1, help="Characters from the beginning of each text.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Write the model card of a model from its record; with --about and --test, measure it first."""
    from lex_hf import card as cards

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
            )
        console.print(f"The card is in {cards.write_card(folder)}", soft_wrap=True, highlight=False)


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
    from rich.text import Text

    sent = [file for file in files if file.sent]
    total = decimal(sum(file.size for file in sent))
    caption = f"{len(sent)} files, {total}, would be sent; the rest stays."
    table = Table(title=Text(title), caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("file", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("sent", no_wrap=True)
    table.add_column("what, or why not")
    for file in files:
        table.add_row(Text(file.path), decimal(file.size), "yes" if file.sent else "no", file.what)
    return table


def _prompt(text: str, tokenizer: Any) -> Any:
    """Tokenise a prompt; an empty one begins with the start token."""
    inputs = tokenizer(text or tokenizer.bos_token or "", return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("The prompt is empty, and the tokenizer has no start token: give at least one character.")
    return inputs


def _batch_size(text: str) -> Any:
    """A number, or what else was typed, such as auto."""
    return int(text) if text.isdecimal() else text


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
        highlight=False,
    )


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows under their names; the file appears only when it is whole."""
    from csv import DictWriter

    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def _check_plot(path: Path | None, lengths: list[int] | None) -> None:
    if path is not None and len(set(lengths or ())) < 2:
        raise ValueError("--plot draws perplexity against length: give --length at least twice.")


def _plot_perplexity(path: Path, model: str, config: Any, results: list[Any]) -> None:
    from lex_hf import plots

    known = getattr(config, "training_length", None) or getattr(config, "max_position_embeddings", None)
    if known is None:
        raise ValueError(f"--plot marks the training length, but the configuration of {model} does not tell it.")
    ordered = sorted(results, key=lambda result: result.length)
    curve = {result.length: result.perplexity for result in ordered}
    intervals = {result.length: result.confidence_interval for result in ordered if result.confidence_interval}
    bands = {model: intervals} if intervals else None  # of a single text there are none
    title = f"{model}, {results[0].protocol}"
    plots.save(plots.perplexity_by_length({model: curve}, known, title=title, intervals=bands), path)


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
    from lex_hf.data import load_documents, tokenize_documents
    from lex_hf.perplexity import load_for_evaluation

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


def _write_measurements(folder: Path | None, name: str, results: dict[str, Any], pictures: dict[str, Any]) -> None:
    """Write numbers and pictures, each under its name only when it is whole."""
    from lex_hf import plots

    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.json.partial"
    partial.write_text(json.dumps({key: result.to_dict() for key, result in results.items()}) + "\n")
    partial.replace(folder / f"{name}.json")
    for title, figure in pictures.items():
        plots.save(figure, folder / f"{title}.png")


def _two_patterns(names: list[str] | None) -> list[str | None]:
    patterns: list[str | None] = [*names] if names else [None]
    if len(patterns) > 2:
        raise ValueError(f"--attention-pattern is given {len(patterns)} times: once for both models, or twice.")
    return [patterns[0], patterns[-1]]


def _says(holds: bool, what: str) -> str:
    return what if holds else f"not: {what}"


def _pattern(name: str | None) -> dict[str, str]:
    return {} if name is None else {"attention_pattern": name}


def _model_to_train(model: str | None, tokenizer: str, fields: list[str], length: int, seed: int) -> tuple[Any, Any]:
    """Load what is to be fine-tuned, or make a new model of the size that `fields` say."""
    from transformers import AutoTokenizer, set_seed

    from lex_hf import LexConfig, LexForCausalLM
    from lex_hf.perplexity import load_for_evaluation
    from lex_hf.tokenization import byte_tokenizer

    set_seed(seed)
    if model is not None:
        if fields:
            raise ValueError(f"--config {fields[0]}: --model {model} has a configuration of its own.")
        return load_for_evaluation(model, device="cpu")
    words = byte_tokenizer() if tokenizer == "bytes" else AutoTokenizer.from_pretrained(tokenizer)
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    defaults = {"vocab_size": len(words), "training_length": length, "xpos_scale_base": length // 2}
    return LexForCausalLM(LexConfig(**(defaults | ids | dict(map(_field, fields))))), words


def _field(text: str) -> tuple[str, Any]:
    """Read `name=value`, where the value is JSON or else a string."""
    from dataclasses import fields

    from lex_hf import LexConfig

    name, equals, value = text.partition("=")
    if not equals or name not in {field.name for field in fields(LexConfig)}:
        raise ValueError(f"--config {text}: it must be NAME=VALUE with a field of LexConfig, as num_hidden_layers=6.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@contextlib.contextmanager
def _session(as_json: bool = False) -> Iterator[Console]:
    """Keep standard output free for JSON, where libraries print; say what went wrong in a sentence."""
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            yield Console(stderr=as_json)
        except KeyboardInterrupt as interruption:  # of a training that was stopped: it says how to go on
            _fail(str(interruption) or "Interrupted.", 130)
        except (ValueError, OSError, SafetensorError, StrictDataclassError) as error:
            _fail(f"Error: {error}", 1)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(message, markup=False, highlight=False)
    raise typer.Exit(code)


def main() -> None:
    """Run the command line."""
    app()

"""Generation: generate, generate-corpus, serve."""

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from lex_hf.cli import capacity, options
from lex_hf.cli.options import (
    LARGEST_SEED,
    MOST,
    Blockwise,
    Device,
    Dtype,
    Files,
    Json,
    Model,
    Pattern,
    Sinks,
    TextField,
    Trust,
    Weights,
    finite,
    typed,
)
from lex_hf.cli.printing import is_main_process, print_json, session, show


class LogLevel(enum.StrEnum):
    """Levels of a server's log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The text to continue; '-' reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens to generate.")] = 200,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token instead of sampling.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, callback=finite, help="Temperature of sampling.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="Nucleus of sampling.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of sampling.")] = 0,
    attention_pattern: Pattern = None,
    blockwise: Blockwise = None,
    sinks: Sinks = 0,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a text, of any length, in constant memory; the text appears as it is written."""
    from transformers import TextStreamer, set_seed

    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.sweep import of_pattern
    from lex_hf.inference.generation import continue_text, encode_prompt

    with session(as_json, prints=True):
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks) | options.packing(
            weights, device
        )
        beginning = _standard_input() if prompt == "-" else typed(prompt, "PROMPT")
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(attention_pattern))
        inputs = encode_prompt(beginning, network, tokenizer)
        set_seed(seed)
        sampling = {} if greedy else {"temperature": temperature, "top_p": top_p}
        tokens = continue_text(
            network,
            inputs,
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            streamer=None if as_json else TextStreamer(tokenizer),
            **sampling,
        ).tolist()
    if as_json:
        print_json({"text": tokenizer.decode(tokens), "tokens": tokens})


def generate_corpus(
    model: Model,
    files: Files,
    output: Annotated[
        Path, typer.Option(help="Folder of the continuations, new or of a run that was stopped; then it continues.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens to generate for each prompt.")] = 200,
    greedy: Annotated[bool, typer.Option(help="Take the most probable token instead of sampling.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, callback=finite, help="Temperature of sampling.")] = 0.8,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, callback=finite, help="Nucleus of sampling.")] = 0.95,
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the first prompt; the next ones follow it.")
    ] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends a continuation; several times.")] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(min=2, max=MOST, help="Read the last tokens of longer prompts alone, and count these."),
    ] = None,
    include_prompts: Annotated[bool, typer.Option(help="Write prompts beside their continuations.")] = False,
    rows: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Prompts continued at once; as memory allows by default.")
    ] = None,
    piece: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of prompts that are read between two steps.")
    ] = None,
    attention_pattern: Pattern = None,
    blockwise: Blockwise = None,
    sinks: Sinks = 0,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    text_field: TextField = "text",
    as_json: Json = False,
) -> None:
    """Continue every text of a corpus that may be larger than memory, many at once; a run that was stopped continues.

    Under torchrun or accelerate launch the texts are shared out between the processes.
    """
    from lex_hf.data.documents import stream_documents
    from lex_hf.evaluation.loading import load_for_evaluation
    from lex_hf.evaluation.sweep import of_pattern
    from lex_hf.inference import corpus
    from lex_hf.records import check_folder

    with session(as_json) as console:
        _check_readable_twice(files)
        check_folder(output, "--output")
        chosen = corpus.CorpusOptions(
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            temperature=None if greedy else temperature,
            top_p=None if greedy else top_p,
            seed=seed,
            stop_strings=[typed(each, "--stop") for each in stop or ()],
            max_prompt_tokens=max_prompt_tokens,
            include_prompts=include_prompts,
            rows=rows,
            piece=piece,
        )
        loading = options.loading(device, dtype, trust_remote_code, blockwise, sinks)
        prompts = stream_documents(files, text_field=text_field)
        network, tokenizer = load_for_evaluation(model, **loading, **of_pattern(attention_pattern))
        result = corpus.generate_corpus(network, tokenizer, prompts, output, chosen)
    if is_main_process():
        show(console, as_json, result.to_dict(), _continued(result))


def _check_readable_twice(files: list[str]) -> None:
    for each in files:
        if Path(each).is_fifo():
            raise ValueError(
                f"{each} is a pipe, which can be read only once, and prompts are read again to continue a run: write "
                "them to a file first."
            )


def _continued(result: Any) -> str:
    """Return a result as sentences."""
    reasons = result.finish_reasons
    lines = [
        f"{result.prompts} prompts, {result.prompt_tokens} tokens read, {result.tokens} written",
        f"{reasons.get('stop', 0)} ended by themselves, {reasons.get('length', 0)} at the limit",
    ]
    if result.finished_before:
        lines.append(f"{result.finished_before} were finished before")
    if result.cut:
        lines.append(f"of {result.cut} only the last tokens were read")
    return "\n".join(lines)


def serve(
    context: typer.Context,
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    blockwise: Blockwise = None,
    sinks: Sinks = 0,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    attn_implementation: Annotated[str | None, typer.Option(help="Attention function, e.g. sdpa.")] = None,
    trust_remote_code: Trust = False,
    compile: Annotated[bool, typer.Option(help="Compile the steps before listening.")] = False,
    rows: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Requests written at once; as many as memory allows by default."),
    ] = None,
    piece: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Tokens of prompts read between two steps, at most.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=LARGEST_SEED, help="Seed of sampling for requests without one.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, max=MOST, help="Requests that may wait for a row; further ones are answered 429.")
    ] = 128,
    max_body_bytes: Annotated[str, typer.Option(help="Longest body of a request, e.g. 8MiB.")] = "8MiB",
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Longest prompt; 1,000,000 by default.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Longest answer; 32,768 by default.")
    ] = None,
    session_bytes: Annotated[
        str | None,
        typer.Option(help="Memory, or disk, for caches from which chats go on, e.g. 2GiB; by default none."),
    ] = None,
    session_folder: Annotated[Path | None, typer.Option(help="Keep them there; in memory by default.")] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Further name of the server, or '*' for any; several times.")
    ] = None,
    enable_cors: Annotated[bool, typer.Option(help="Let pages of any origin use the server.")] = False,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Variables of the chat template as JSON, e.g. '{\"enable_thinking\": false}'.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, callback=finite, help="Seconds in which requests may finish when it is stopped.")
    ] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="Level of the log of HTTP requests.")] = LogLevel.INFO,
    continuous_batching: Annotated[bool, typer.Option(hidden=True, help="As always.")] = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Processes of Ray Serve that share the requests.")
    ] = None,
    replica_cpus: Annotated[float | None, typer.Option(help="Cores of each of them; 1 by default.")] = None,
    replica_gpus: Annotated[float | None, typer.Option(help="GPUs of each of them; 0 by default.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Ray cluster of the replicas, e.g. auto; by default one on this machine.")
    ] = None,
    dry_run: capacity.DryRun = False,
    device_memory: capacity.DeviceMemory = None,
    bandwidth: capacity.Bandwidth = None,
    as_json: Json = False,
) -> None:
    """Serve a model over HTTP, for `transformers chat` and OpenAI's clients, many requests at once.

    Ctrl-C lets requests finish, a second one ends them. Needs pip install 'lex-hf[serve]'; --dry-run needs neither
    that nor weights. --replicas needs pip install 'lex-hf[ray]'.
    """
    if dry_run or as_json or device_memory is not None or bandwidth is not None:
        given = capacity.typed(context)
        asked = capacity.Asked(
            model, device_memory, bandwidth, blockwise, sinks, device, dtype, trust_remote_code, given
        )
        capacity.dry_run(asked, is_wanted=dry_run, as_json=as_json)
        return
    with session(prints=True):
        settings = {
            "host": host,
            "port": port,
            "grace": grace,
            "log_level": log_level.value,
            **options.loading(device, dtype, trust_remote_code, blockwise, sinks) | options.packing(weights, device),
            "attn_implementation": attn_implementation,
            "compile": compile,
            "rows": rows,
            "piece": piece,
            "seed": seed,
            "max_waiting": max_waiting,
            "max_body_bytes": capacity.parse_size(max_body_bytes, "--max-body-bytes"),
            "max_prompt_tokens": max_prompt_tokens,
            "max_new_tokens": max_new_tokens,
            "session_bytes": 0 if session_bytes is None else capacity.parse_size(session_bytes, "--session-bytes"),
            "session_folder": session_folder,
            "allowed_hosts": allowed_host or (),
            "enable_cors": enable_cors,
            "chat_template_kwargs": options.json_object(chat_template_kwargs, "--chat-template-kwargs"),
        }
        _serve(model, settings, replicas, cpus=replica_cpus, gpus=replica_gpus, address=ray_address)


def _serve(model: str, given: dict[str, Any], replicas: int | None, **where: Any) -> None:
    """Serve in this process, or in several."""
    places = {name: value for name, value in where.items() if value is not None}
    if replicas is not None:
        from lex_hf.inference.replicas import run

        run(model, replicas=replicas, **given, **places)
        return
    if places:
        raise ValueError("--replica-cpus, --replica-gpus and --ray-address belong to --replicas: give it as well.")
    from lex_hf.inference.serve import serve

    serve(model, **given)


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

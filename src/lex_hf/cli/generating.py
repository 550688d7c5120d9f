"""Generation: generate, serve."""

import sys
from typing import Annotated

import typer

from lex_hf.cli import capacity, options
from lex_hf.cli.options import (
    LARGEST_SEED,
    MOST,
    Blockwise,
    Device,
    Dtype,
    Json,
    Model,
    Pattern,
    Sinks,
    Trust,
    Weights,
    finite,
    typed,
)
from lex_hf.cli.printing import print_json, session


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

    with session(as_json):
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


def serve(
    context: typer.Context,
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    blockwise: Blockwise = None,
    sinks: Sinks = 0,
    dry_run: capacity.DryRun = False,
    device_memory: capacity.DeviceMemory = None,
    bandwidth: capacity.Bandwidth = None,
    as_json: Json = False,
    weights: Weights = None,
) -> None:
    """Serve a model over HTTP, for `transformers chat` and OpenAI's clients; Ctrl-C ends it.

    All further options, after MODEL, are those of `transformers serve`, which `transformers serve --help` explains;
    needs pip install 'lex-hf[serve]'. --dry-run needs neither that nor weights.
    """
    if dry_run or as_json or device_memory is not None or bandwidth is not None:
        asked = capacity.Asked(model, device_memory, bandwidth, blockwise, sinks, context.args)
        capacity.dry_run(asked, is_wanted=dry_run, as_json=as_json)
        return
    from lex_hf.inference import serve as server

    with session():
        packed = options.packing(weights).get("quantization_config")
        server.serve(
            model,
            host=host,
            port=port,
            **options.blocks(blockwise, sinks),
            quantization_config=packed,
            options=context.args,
        )


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

"""Arguments and options that several commands share."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

MOST = 10**9  # of steps and of tokens
LARGEST_SEED = 2**32 - 1  # of NumPy
READING, OUTPUT = "How the model is loaded and reads", "Output"  # sections of help texts


def finite(value: float) -> float:
    """Refuse NaN and infinity, which ranges let pass."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def typed(text: str, name: str) -> str:
    """Refuse what was typed in another encoding."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text, from character {error.start + 1} on: convert it.") from error
    return text


def loading(
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool,
    blockwise: str | None,
    sinks: int,
    layers: list[int] | None = None,
    yarn_factor: float | None = None,
) -> dict[str, Any]:
    """Return the options of `load_for_evaluation` that commands have.

    Raises:
        ValueError: If `--blockwise` is neither 'auto' nor a number, or is missing where there are options of blocks;
            or `--yarn-factor` is given without layers that keep full attention.
    """
    if layers and blockwise is None:
        raise ValueError(f"--blockwise-layer {layers[0]}: a layer reads in blocks with --blockwise only; give it.")
    if yarn_factor is not None and not layers:
        raise ValueError(
            f"--yarn-factor {yarn_factor:g}: it is for layers that keep full attention beside others that read in "
            "blocks; give --blockwise, and --blockwise-layer for each of these."
        )
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    of_layers = {"layers": layers, "yarn_factor": yarn_factor} if layers else {}
    return options | blocks(blockwise, sinks) | of_layers


def blocks(text: str | None, sinks: int) -> dict[str, Any]:
    """Read the training length of `--blockwise`, or auto, and the number of sinks.

    Raises:
        ValueError: If it is neither, or is missing where there are sinks.
    """
    if text is None and sinks:
        raise ValueError(f"--sinks {sinks}: only a model that reads in blocks has sinks; give --blockwise as well.")
    if text is None or text == "auto":
        return {"blockwise": text, "sinks": sinks}
    if not text.isdecimal():
        raise ValueError(f"--blockwise {text}: it must be 'auto' or a number of tokens, e.g. 2048.")
    return {"blockwise": int(text), "sinks": sinks}


def packing(weights: str | None, device: str | None = None) -> dict[str, Any]:
    """Return the options of `load_for_evaluation` for `--weights`; none without it.

    Raises:
        ValueError: If it is neither int8 nor int4, or the device is not a CPU.
    """
    if weights is None:
        return {}
    if weights not in ("int8", "int4"):
        raise ValueError(f"--weights {weights}: it must be int8 or int4; --dtype gives other dtypes.")
    if device not in (None, "cpu"):
        raise ValueError(f"--weights {weights}: such weights are multiplied on a CPU; leave out --device {device}.")
    from lex_hf.inference.packed_weights import PackedWeightsConfig

    return {"device": "cpu", "quantization_config": PackedWeightsConfig(int(weights.removeprefix("int")))}


def json_object(text: str | None, option: str) -> dict[str, Any]:
    """Read an object of JSON; none is an empty one.

    Raises:
        ValueError: If it is none.
    """
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text}: it must be an object of JSON, e.g. '{{\"enable_thinking\": false}}'.")
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
        rich_help_panel=OUTPUT,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="Print the result and errors alone: no progress, no notices.", rich_help_panel=OUTPUT
    ),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; a GPU if there is one.", rich_help_panel=READING)
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.", rich_help_panel=READING),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="int8 or int4: round the weights of linear layers to these; on a CPU, where fewer are faster.",
        rich_help_panel=READING,
    ),
]
Pattern = Annotated[
    str | None, typer.Option(help="blockwise, sliding or full; the model's own by default.", rich_help_panel=READING)
]
Blockwise = Annotated[
    str | None,
    typer.Option(
        help="Let a model with rotary positions read in blocks: its training length in tokens, or 'auto' to take it "
        "from the configuration.",
        rich_help_panel=READING,
    ),
]
Sinks = Annotated[
    int,
    typer.Option(
        min=0,
        help="With --blockwise: tokens at the start of a text that every later one sees, too.",
        rich_help_panel=READING,
    ),
]
BlockwiseLayers = Annotated[
    list[int] | None,
    typer.Option(
        "--blockwise-layer",
        min=0,
        help="With --blockwise: a layer that reads in blocks, counted from 0; several times; the others keep full "
        "attention. All by default.",
        rich_help_panel=READING,
    ),
]
YarnFactor = Annotated[
    float | None,
    typer.Option(
        min=1.0,
        help="With --blockwise-layer: the longest text by the training length, by which YaRN scales the frequencies "
        "of the layers that keep full attention. Not at all by default.",
        rich_help_panel=READING,
    ),
]
Trust = Annotated[bool, typer.Option(help="Let code that comes with the model run.", rich_help_panel=READING)]
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
StartToken = Annotated[bool, typer.Option(help="Prepend the BOS token to each text.")]
Records = Annotated[
    Path | None,
    typer.Option(
        help="File of finished texts: a run that was stopped continues from it. May serve several runs.",
        rich_help_panel=OUTPUT,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="Another value for a field, as NAME=VALUE; several times."),
]
Length = Annotated[int, typer.Option(min=2, help="Tokens of a segment.")]
Segments = Annotated[int, typer.Option(min=1, help="Number of segments, taken from the beginnings of the texts.")]
Patterns = Annotated[
    list[str] | None,
    typer.Option(
        "--attention-pattern",
        help="blockwise, sliding or full; several times to compare them.",
        rich_help_panel=READING,
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="Folder for the numbers (JSON) and pictures (PNG).", rich_help_panel=OUTPUT)
]

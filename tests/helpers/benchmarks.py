"""The benchmark at toy size, and a record that meets all targets."""

from pathlib import Path

from record import Peak, Rate, Record, Sample
from settings import Settings

FOLDER = Path(__file__).parents[2] / "benchmarks"

TOY = Settings(
    layers=1,
    hidden_size=32,
    num_heads=2,
    intermediate_size=96,
    training_length=16,
    lengths=(32, 64),
    contexts=(32, 64),
    streaming=(64, 128),
    repeats=2,
    decode_tokens=4,
    burst=2,
    training_repeats=2,
    read_bytes=2**16,
    matmul_size=16,
)


def made_up(**changes: float) -> Record:
    """A record with the times of a model that meets all targets; `changes` are seconds in place of others."""
    seconds = {
        "prefill lex 4096": 4.0,
        "prefill lex 16384": 13.0,
        "prefill linear 16384": 10.0,
        "prefill mistral 16384": 39.0,
        "prefill blockwise_llama 16384": 12.5,
        "prefill linear_llama 16384": 9.0,
        "prefill lex 65536": 64.0,
        "chunked lex 4096": 4.0,
        "chunked lex 65536": 66.0,
        "decode lex 1024": 0.010,
        "decode gpt_neox 1024": 0.012,
        "decode llama 1024": 0.013,
        "decode mistral 1024": 0.011,
        "decode lex 8192": 0.010,
        "decode gpt_neox 8192": 0.055,
        "decode llama 8192": 0.051,
        "decode mistral 8192": 0.010,
        "decode blockwise_llama 1024": 0.020,
        "decode blockwise_llama 8192": 0.020,
        "training lex 1024": 1.01,
        "training none 1024": 1.0,
        "precision lex_float32 1024": 1.0,
        "precision lex_bfloat16 1024": 0.79,
        "precision lex_int8 1024": 0.64,
        "precision lex_int4 1024": 0.49,
        **{name.replace("_to_", " "): value for name, value in changes.items()},
    }
    settings = Settings()
    samples = []
    for name, value in seconds.items():
        measure, system, length = name.split()
        if measure == "precision":
            samples.append(Sample(measure, system, int(length), 1, [value] * 3))
        elif measure == "decode":
            samples.append(Sample(measure, system, int(length), 1, [value] * 512, cache=2**20))
        else:
            samples.append(Sample(measure, system, int(length), int(length), [value] * 3))
    weights = 10**9 - 2 * 4 * 1024 * 4 * 768.5  # with one and a half blocks of keys and values, a billion bytes
    linear = {"description": "", "linear_weights": 1, "weight_bytes": weights}
    return Record(
        "cpu",
        "",
        "",
        {},
        {},
        settings,
        {"lex": linear},
        [Rate("read", "sum", 10**9, [0.009]), Rate("read", "slower", 10**9, [0.02])],
        samples,
        [Peak("streaming", "lex", length, 1, 10**9 + length, 1.0) for length in (8192, 65536)],
    )

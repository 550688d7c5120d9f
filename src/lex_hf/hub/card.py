"""Model cards: the record of the measurements of a model, and the card that is rendered from it.

Only the fields of [`About`] are typed by hand; all figures come from the record.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml  # type: ignore[import-untyped]
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.dataclasses import type_validator
from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed
from transformers.utils import CONFIG_NAME, logging

from lex_hf.data.documents import load_documents
from lex_hf.evaluation import plots
from lex_hf.evaluation.loading import load_for_evaluation
from lex_hf.evaluation.perplexity import compute_perplexity
from lex_hf.records import check_file, read_json, to_json, versions, write_text

logger = logging.get_logger(__name__)

RECORD, CARD, PICTURE = "record.json", "README.md", "perplexity.png"
TEMPERATURE, SAMPLE_TOKENS = 0.7, 120
_LOSSES_SHOWN = 12


@dataclass(frozen=True)
class About:
    """Description of a model by its maker.

    Attributes:
        name: Name of the model.
        repo_id: Name of its repository on the Hub.
        summary: Description in a sentence or two.
        license: Licence of the weights, as the Hub writes it, such as `"apache-2.0"`.
        language: Codes of languages.
        data: Training data: a sentence for each source, with its licence.
        test_data: For each corpus it is tested on, a sentence with its licence.
        limits: Uses that it is not meant for, and where it fails.
        hardware: Hardware that it was trained on.
        command: The command that trained it.
        prompts: Prompts that the card shows continuations of.
        datasets: Names of the training data, as the Hub or their makers write them.
    """

    name: str
    repo_id: str
    summary: str
    license: str
    language: list[str]
    data: list[str]
    test_data: dict[str, str]
    limits: list[str]
    hardware: str
    command: str
    prompts: list[str] = field(default_factory=list)
    datasets: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: str | Path) -> "About":
        """Read a YAML file.

        Raises:
            OSError: If it cannot be read.
            ValueError: If it is not YAML in UTF-8, or a field is missing, unknown or of another type.
        """
        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML in UTF-8: {error}") from error
        known = {each.name for each in fields(cls)}
        needed = known - {"prompts", "datasets"}
        if not isinstance(given, dict) or not needed <= set(given) <= known:
            found = sorted(map(str, given)) if isinstance(given, dict) else type(given).__name__
            raise ValueError(
                f"{path} must have the fields {sorted(needed)}, and may have datasets and prompts; it has {found}."
            )
        kinds = get_type_hints(cls)
        for name, value in given.items():
            try:
                type_validator(name, value, kinds[name])
            except TypeError as error:
                raise ValueError(f"{path}: {error}") from error
        return cls(**given)


def measure(
    folder: str | Path,
    about: About,
    corpora: Mapping[str, Sequence[str]],
    lengths: Sequence[int],
    *,
    characters: int | None = None,
    command: str = "",
    seed: int = 0,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Measure a model for its card, and write `record.json`, the picture and the card into its folder.

    Args:
        folder: A model as [`lex_hf.training.train`] leaves it, with the last checkpoint's `trainer_state.json` in it
            or in a `checkpoint-*` folder.
        about: Its description.
        corpora: Files or folders of each corpus it is tested on.
        lengths: Lengths of segments in tokens; the same texts are scored at each.
        characters: Take so many characters from the beginning of each text; `None` for all of it.
        command: The command that is noted in the record.
        seed: Seed of the samples.
        overwrite: Whether a `README.md` may be replaced that was not rendered from the record in the folder.

    Returns:
        The record.

    Raises:
        ValueError: If a corpus is not described in `about.test_data`, there is no state of the training, or one of
            the files cannot be written or must not be replaced; all that before anything is measured.
    """
    folder = Path(folder)
    check_card(folder, overwrite=overwrite)
    unknown = sorted(set(corpora) - set(about.test_data))
    if unknown or not corpora:
        raise ValueError(f"test_data describes {sorted(about.test_data)}; the corpora are {sorted(corpora)}.")
    if not all(about.prompts):
        raise ValueError("prompts: one is empty; each needs at least one character, or leave it out.")
    if not lengths:
        raise ValueError("There are no lengths to measure at: give at least one, in tokens.")
    training = _training(folder)
    texts = {
        name: [text[:characters] for text in load_documents(list(files))["text"]] for name, files in corpora.items()
    }
    model, tokenizer = load_for_evaluation(str(folder), device="cpu")
    evaluation = {name: _evaluate(model, tokenizer, each, lengths) for name, each in texts.items()}
    record = {
        "about": asdict(about),
        "model": _describe(model),
        "training": training,
        "protocol": "chunked",
        "evaluation": evaluation,
        "samples": [_sample(model, tokenizer, prompt, seed) for prompt in about.prompts],
        "command": command,
        "versions": versions("torch", "transformers"),
    }
    try:
        write_text(folder / RECORD, to_json(record, indent=1, ensure_ascii=False) + "\n")
        write_text(folder / CARD, _render_file(folder / RECORD))
        _draw(folder, record)
    except OSError:  # e.g. a full disk: long measurements must not be lost
        logger.error("This was measured, and could not be written:\n%s", _from_template("table.md", record))
        raise
    return record


def write_card(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Render the card of a model from the record in its folder; `overwrite` is that of [`measure`].

    Raises:
        FileNotFoundError: If there is no record.
        ValueError: If the record was not written by [`measure`], or the card cannot be written or must not be
            replaced.
    """
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(f"{folder} has no {RECORD}: measure the model first, with texts to test it on.")
    check_card(folder, overwrite=overwrite)
    write_text(folder / CARD, _render_file(folder / RECORD))
    return folder / CARD


def check_card(folder: Path, *, overwrite: bool = False) -> None:
    """Check, before any work, that record, picture and card can be written, and nothing typed by hand is lost.

    Raises:
        ValueError: If a file cannot be written, or there is a `README.md` that was not rendered from the record.
    """
    for name in (RECORD, CARD, PICTURE):
        check_file(folder / name, "The file")
    if (folder / CARD).is_file() and not overwrite and not _is_rendered(folder):
        raise ValueError(
            f"{folder / CARD} is not the card of the {RECORD} beside it: it was written or changed by hand. Keep what "
            "it says elsewhere, then give --overwrite (overwrite=True)."
        )


def _is_rendered(folder: Path) -> bool:
    """Return whether the card agrees with the record; libraries lay out the front matter differently."""
    try:
        found = (folder / CARD).read_text(encoding="utf-8")
        return _parts(found) == _parts(_render_file(folder / RECORD))
    except (OSError, ValueError, yaml.YAMLError):
        return False


def _parts(card: str) -> tuple[Any, str]:
    """Split a card into its front matter and its text."""
    start, data, text = card.split("---\n", 2)
    return (start, yaml.safe_load(data)), text


def _render_file(path: Path) -> str:
    try:
        return render(read_json(path))
    except (AttributeError, IndexError, KeyError, TypeError, UndefinedError) as error:
        raise ValueError(
            f"{path} is not a record of `lex-hf card` ({type(error).__name__}: {error}): measure the model again."
        ) from error


def render(record: Mapping[str, Any]) -> str:
    """Render a record as a model card with the front matter of the Hub."""
    losses = record["training"]["losses"]
    stride = max(1, -(-len(losses) // _LOSSES_SHOWN))
    text = _from_template(
        "model_card.md",
        record,
        card_data=_card_data(record).to_yaml(),
        temperature=TEMPERATURE,
        verdicts=_verdicts(record),
        quoted=[_quoted(each) for each in record["samples"]],
        losses=losses[::-1][::stride][::-1],  # the last one among them
    )
    return str(ModelCard(text).content).rstrip() + "\n"


def _from_template(name: str, record: Mapping[str, Any], **values: Any) -> str:
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    templates = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return templates.get_template(name).render(dict(record), number=_number, **values)


def _card_data(record: Mapping[str, Any]) -> ModelCardData:
    about = record["about"]
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=name,
            dataset_name=name,
            metric_type="perplexity",
            metric_name=f"Perplexity at {length} tokens",
            metric_value=round(found["perplexity"], 3),
        )
        for name, curve in record["evaluation"].items()
        for length, found in curve.items()
        if _is_finite(found["perplexity"])
    ]
    return ModelCardData(
        model_name=about["name"],
        language=about["language"],
        datasets=about["datasets"] or None,
        license=about["license"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["lex", "xpos", "length-extrapolation", "long-context", "custom_code"],
        metrics=["perplexity"],
        eval_results=results,
    )


def _describe(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config
    patterns = config.layer_patterns
    span = max(config.attention_span(pattern) or 0 for pattern in patterns)
    return {
        "parameters": f"{model.num_parameters() / 1e6:.2f}",
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "scheme": _counted(config.layer_schemes),
        "pattern": _counted(patterns),
        "training_length": config.training_length,
        "cache_tokens": 2 * span if span else "any number of",
        "full_layers": patterns.count("full"),
    }


def _counted(names: Sequence[str]) -> str:
    """Return the only name, or each with the number of its layers."""
    counts = Counter(names)
    each = (f"{name} ({count} layer{'s' if count > 1 else ''})" for name, count in counts.items())
    return names[0] if len(counts) == 1 else " and ".join(each)


def _training(folder: Path) -> dict[str, Any]:
    """Read losses, tokens and time from the state of the `Trainer`."""
    states = sorted(folder.glob("**/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    if not states:
        raise ValueError(f"{folder} holds no trainer_state.json: measure the folder that the training wrote.")
    state = read_json(states[-1])
    history = state["log_history"]
    return {
        "steps": state["global_step"],
        "tokens": int(max(entry.get("num_input_tokens_seen", 0) for entry in history)),
        "length": read_json(folder / CONFIG_NAME)["training_length"],
        "seconds": max(entry.get("train_runtime", 0.0) for entry in history),
        "losses": [[entry["step"], float(entry["loss"])] for entry in history if "loss" in entry],
    }


def _evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], lengths: Sequence[int]
) -> dict[str, dict[str, Any]]:
    curve = {}
    for length in sorted(lengths):
        batch_size = max(1, 8192 // length)
        result = compute_perplexity(model, tokenizer, texts, length=length, batch_size=batch_size, progress=False)
        low, high = result.confidence_interval or (None, None)
        curve[str(length)] = {
            "perplexity": result.perplexity,
            "low": low,
            "high": high,
            "bits_per_byte": result.bits_per_byte,
            "tokens": result.tokens,
            "texts": len(texts),
        }
    return curve


def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int) -> dict[str, str]:
    set_seed(seed)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = model.generate(**inputs, do_sample=True, temperature=TEMPERATURE, max_new_tokens=SAMPLE_TOKENS)
    return {"prompt": prompt, "text": tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])}


def _draw(folder: Path, record: Mapping[str, Any]) -> None:
    curves = {
        name: {int(length): found["perplexity"] for length, found in curve.items()}
        for name, curve in record["evaluation"].items()
    }
    intervals = {
        name: {int(length): (found["low"], found["high"]) for length, found in curve.items()}
        for name, curve in record["evaluation"].items()
        if all(found["low"] is not None for found in curve.values())
    }
    title = f"{record['about']['name']}, {record['protocol']}"
    figure = plots.perplexity_by_text(
        curves, record["model"]["training_length"], title=title, intervals=intervals or None
    )
    plots.save(figure, folder / PICTURE)


def _number(value: float | None, digits: int) -> str:
    """Format a number; JSON has `null` for those that are not finite."""
    return f"{value:.{digits}f}" if _is_finite(value) else "not finite"


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _verdicts(record: Mapping[str, Any]) -> list[str]:
    """Say for each corpus how far the perplexity falls."""
    trained = record["model"]["training_length"]
    lines = []
    for name, curve in record["evaluation"].items():
        values = {
            int(length): found["perplexity"] if _is_finite(found["perplexity"]) else math.inf
            for length, found in curve.items()
        }
        lengths = sorted(values)
        steps = [(a, b) for a, b in itertools.pairwise(lengths) if values[b] >= values[a]]
        beyond = f"{lengths[-1] / trained:g} times the training length"
        where = ", ".join(f"from {a} to {b}" for a, b in steps)
        if steps:
            lines.append(f"- {name}: up to {beyond}, the perplexity does not fall {where} tokens.")
        else:
            lines.append(f"- {name}: the perplexity falls at every step, up to {beyond}.")
    return lines


def _quoted(sample: Mapping[str, str]) -> str:
    text = f"**{sample['prompt'].strip()}**{sample['text']}".strip()
    return "\n".join(f"> {line}".rstrip() for line in text.splitlines())

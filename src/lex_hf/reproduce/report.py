"""A record as a report: text and pictures, from the record alone."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lex_hf.evaluation import plots
from lex_hf.evaluation.receptive_field import ReceptiveField
from lex_hf.records import to_json, write_text

RECORD, REPORT = "record.json", "report.md"
NO_TEXTS = "computed from the configuration"
_PROTOCOLS = {
    "chunked": "each text is cut into segments of the length, each read alone; the same tokens count at every length",
    "last_token": "the last token of each segment, after one token less than the length; the same tokens for all",
    "resolution": "attention resolution R(s) of each layer's mean scores, averaged over the layers",
    "receptive_field": "cumulative normalised gradient of the prediction after the last token of a segment",
    "expectation": "the expectation of scores by distance (Eq. 10), computed from the configuration",
}
_OF_MEAN_CURVES = {"resolution": "Resolutions are", "receptive_field": "Receptive fields are"}
_SHOWN_PARTS = 12
_MOST_CURVES = 6  # that a reader can follow in one picture


def write(folder: Path, record: Mapping[str, Any]) -> None:
    """Write record, report and pictures; see [`write_files`]."""
    write_files(folder, record, render(record), pictures(record))


def write_files(folder: Path, record: Mapping[str, Any], text: str, figures: Mapping[str, Figure]) -> None:
    """Write a record, its report and its pictures by the names of their files; each appears only when it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RECORD, to_json(record, indent=1, ensure_ascii=False) + "\n")
    write_text(folder / REPORT, text)
    for name, figure in figures.items():
        plots.save(figure, folder / name)


def render(record: Mapping[str, Any]) -> str:
    """Render the report as Markdown."""
    blocks = [*_introduction(record)]
    for name, result in record["results"].items():
        blocks += [f"## {heading_of(name, result)}", *_results(record, name, result)]
    blocks += ["## How it was made", *making(record)]
    return "\n\n".join(blocks) + "\n"


def _introduction(record: Mapping[str, Any]) -> Iterator[str]:
    paper = record["published"]
    yield f"# {paper['where']} of {paper['id']}, at the scale `{record['preset']['name']}`"
    yield f"{paper['title']}: *{paper['paper']}*, {paper['where']}."
    scale = f"Training length l = {record['training_length']} tokens here, {paper['training_length']} in the paper"
    yield (
        f"{scale}; lengths and windows are scaled by it, slopes are as printed. "
        f"Measured: {_PROTOCOLS[record['measure']]}."
    )
    if fields := record["preset"].get("fields"):  # records of earlier versions have none
        yield f"Set in all systems that do not have their own: {', '.join(f'`{k}={v}`' for k, v in fields.items())}."
    if paper["note"]:
        yield f"On the printed figures: {paper['note']}"


def heading_of(name: str, result: Mapping[str, Any]) -> str:
    """Return the heading of what was measured on some texts."""
    title = name[:1].upper() + name[1:]
    return title if result["corpus"] is None else f"{title}, beside {result['corpus']}"


def _results(record: Mapping[str, Any], name: str, result: Mapping[str, Any]) -> Iterator[str]:
    yield _summary(result["statements"])
    yield comparison_table(record, result)
    yield _legend(record)
    yield from (f"![{heading_of(name, result)}]({file})" for file in picture_names(record, name))
    yield "### Where it agrees with the paper, and where not"
    claims = [each for each in result["statements"] if each["kind"] == "claim"]
    numbers = [each for each in result["statements"] if each["kind"] != "claim"]
    for title, chosen in (("What the text says:", claims), ("What the printed numbers say:", numbers)):
        if chosen:
            yield title
            yield "\n".join(_sentence(record, each) for each in chosen)
    intervals = _interval_table(record, result)
    if intervals:
        yield "### Intervals over documents"
        text = "95 % bootstrap intervals over the documents (or segments) of the mean over the seeds."
        if record["measure"] in _OF_MEAN_CURVES:
            text += (
                f" {_OF_MEAN_CURVES[record['measure']]} of mean curves; pseudo-values (jackknife) stand for segments."
            )
        yield text
        yield intervals


def _summary(statements: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for kind, what in (("claim", "claims of the text"), ("order", "pairs of systems"), ("trend", "steps in length")):
        chosen = [each for each in statements if each["kind"] == kind]
        verdicts = [each["verdict"] for each in chosen]
        if kind != "claim":
            verdicts = [part["verdict"] for each in chosen for part in each["parts"]]
        if verdicts:
            lines.append(f"- {len(verdicts)} {what}: {counted(verdicts)}")
    return "\n".join(lines)


def counted(verdicts: Sequence[str]) -> str:
    """Return how often each verdict is among these, in words."""
    words = {"agrees": "agree", "disagrees": "disagree"}
    order = ("agrees", "disagrees", "not significant", "not tested")
    counts = {verdict: sum(each == verdict for each in verdicts) for verdict in order}
    return ", ".join(f"{count} {words.get(verdict, verdict)}" for verdict, count in counts.items() if count)


def comparison_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return a table with our row of each system, and under it the printed one."""
    printed = record["published"]["printed"].get(result["corpus"], {})
    rows = []
    for system, cells in result["cells"].items():
        rows.append([system, *(_cell(record, cells.get(column)) for column in record["columns"])])
        if system in printed:
            row = printed[system]
            rows.append(["*as printed*", *(_italic(row.get(column, "")) for column in record["columns"])])
    return markdown_table(_head(record), rows)


def _head(record: Mapping[str, Any]) -> list[str]:
    return ["system", *(_column_title(record, column) for column in record["columns"])]


def _column_title(record: Mapping[str, Any], column: str) -> str:
    if not record["by_length"]:
        return column
    return f"{record['lengths'][column]} ({_multiple(int(column), record['published']['training_length'])})"


def _multiple(length: int, unit: int) -> str:
    if length < unit and unit % length == 0:
        return f"l/{unit // length}"
    return "l" if length == unit else f"{length / unit:g} l"


def _italic(text: str) -> str:
    return f"*{text.replace('*', chr(92) + '*')}*" if text else ""


def _cell(record: Mapping[str, Any], cell: Mapping[str, Any] | None) -> str:
    """Mean, and half the width of its interval over the seeds."""
    if cell is None:
        return ""
    mean, interval = _shown(record, cell["mean"]), cell["seed_interval"]
    mark = cell["mark"].replace("*", chr(92) + "*")
    if interval is None:
        return f"{_number(mean)}{mark}"
    low, high = _ends(record, interval)
    return f"{_number(mean)} ± {_number((high - low) / 2)}{mark}"


def _shown(record: Mapping[str, Any], value: float) -> float:
    """Losses are shown as perplexities."""
    if not record["perplexity"]:
        return value
    return math.inf if value >= 700 else math.exp(value)


def _ends(record: Mapping[str, Any], interval: Sequence[float]) -> tuple[float, float]:
    return _shown(record, interval[0]), _shown(record, interval[1])


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3f}"


def _legend(record: Mapping[str, Any]) -> str:
    seeds = len(record["seeds"])
    words = []
    if seeds > 1:
        words.append(
            f"Mean of {seeds} seeds ± half the width of its 95 % t interval. Verdicts and marks rest on differences "
            "paired by seed."
        )
    elif seeds == 1:
        words.append("One seed: differences are paired by document, and hold for these trained models alone.")
    if record["reference"] is not None:
        words.append(
            f"† {record['reference']} is significantly better, \\* significantly worse (paired two-sided t-test, "
            "at 0.05); marks of printed rows are the paper's."
        )
    words.append("Printed rows are of other texts, larger models and longer training: compare orders, not values.")
    return " ".join(words)


def _sentence(record: Mapping[str, Any], statement: Mapping[str, Any]) -> str:
    text = with_lengths(record, statement["text"])
    parts = statement["parts"]
    if len(parts) == 1:
        return f"- **{statement['verdict']}**: {text} ({evidence(record, parts[0])})"
    head = f"- **{statement['verdict']}**: {text}: {counted([part['verdict'] for part in parts])}"
    # Of the printed numbers there are many pairs: evidence for those that disagree, names for those left open.
    shown = [part for part in parts if statement["kind"] == "claim" or part["verdict"] == "disagrees"]
    lines = [f"  - {part['verdict']}: {relation(record, part)} ({evidence(record, part)})" for part in shown]
    unclear = [part for part in parts if part not in shown and part["verdict"] != "agrees"]
    if unclear:
        lines.append(f"  - left open: {'; '.join(relation(record, part) for part in unclear)}")
    if len(lines) > _SHOWN_PARTS:
        lines = [*lines[:_SHOWN_PARTS], f"  - and {len(lines) - _SHOWN_PARTS} more, in {RECORD}"]
    return "\n".join([head, *lines])


def with_lengths(record: Mapping[str, Any], text: str) -> str:
    """Put the lengths of a record's scale in the place of those printed, which stand in braces."""
    for printed, length in record["lengths"].items():
        text = text.replace(f"{{{printed}}}", str(length))
    return text


def relation(record: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return in words what a part of a statement says."""
    left, right = (_place(record, part[side]) for side in ("left", "right"))
    return f"{left} {part['relation']} {right}"


def _place(record: Mapping[str, Any], place: Any) -> str:
    if not isinstance(place, list | tuple):
        return f"{place:g}"
    system, column = place
    return f"{system} at {record['lengths'][column]}" if record["by_length"] else f"{system}, {column}"


def evidence(record: Mapping[str, Any], part: Mapping[str, Any]) -> str:
    """Return the difference with its interval, as a ratio of perplexities where they are, and the test."""
    if "difference" not in part:
        return str(part["reason"])
    what = "ratio" if record["perplexity"] else "difference"
    numbers = f"{what} {_difference(record, part['difference'])}"
    if part["pairing"] == "exact":
        return numbers
    if part["interval"] is None:
        return f"{numbers}, a single seed and too few documents to test"
    low, high = (_difference(record, end) for end in part["interval"])
    pairs = f"{part['pairs']} {part['pairing']}"
    alike = math.isclose(*part["interval"], rel_tol=1e-9, abs_tol=1e-12)  # of which a test says p = 0, or 1
    test = f"the same in all {pairs}" if alike else f"p = {part['p_value']:.2g} over {pairs}"
    if part["pairing"] == "seeds" and part["document_p_value"] is not None:
        test += f", p = {part['document_p_value']:.2g} over {part['documents']} documents"
    return f"{numbers} [{low}, {high}], {test}"


def _difference(record: Mapping[str, Any], value: float) -> str:
    if not record["perplexity"]:
        return f"{value:+.3g}"
    return "∞" if value >= 700 else f"{math.exp(value):.4g}"


def _interval_table(record: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    rows = []
    for system, cells in result["cells"].items():
        ends = [cells[column]["document_interval"] if column in cells else None for column in record["columns"]]
        if any(ends):
            rows.append([system, *("" if each is None else _interval(record, each) for each in ends)])
    return markdown_table(_head(record), rows) if rows else ""


def _interval(record: Mapping[str, Any], interval: Sequence[float]) -> str:
    return " to ".join(map(_number, _ends(record, interval)))


def making(record: Mapping[str, Any]) -> Iterator[str]:
    """Say how a record was made: the command, the models, the texts, hardware and versions."""
    yield f"`{record['command']}`, {record['created']}."
    if record["models"]:
        head = ["model", "systems", "parameters", "steps", "tokens", "loss", "seconds"]
        yield markdown_table(head, [_model_row(each) for each in record["models"]], words=2)
        yield "Loss: mean over the training, in nats per token. Seconds: of the last uninterrupted part of it."
        if any(each["identity"]["training"].get("bf16") for each in record["models"]):
            yield "The models were trained in mixed precision, with bfloat16."
    texts = [*([record["data"]] if record["data"] else []), *record["tests"].values()]
    if texts:
        yield "\n".join(
            f"- {each['name']}: {each['documents']} documents, {each['bytes']} bytes, {', '.join(each['sources'])} "
            f"(SHA-256 {each['sha256'][:16]}…)"
            for each in texts
        )
    hardware = record["hardware"]
    accelerators = ", ".join(hardware["accelerators"]) or "no accelerator"
    yield (
        f"{hardware['system']} on {hardware['machine']}, {hardware['threads']} threads, {accelerators}, "
        f"{hardware['processes']} process{'es' if hardware['processes'] > 1 else ''}; "
        f"{record['seconds']['all']:.0f} s, of which {record['seconds']['training']:.0f} s went into training."
    )
    yield ", ".join(f"{name} {version}" for name, version in record["versions"].items()) + "."


def _model_row(model: Mapping[str, Any]) -> list[str]:
    numbers = [str(model[name]) for name in ("parameters", "steps", "tokens")]
    loss = f"{model['train_loss']:.4f}"
    return [f"`{model['name']}`", ", ".join(model["systems"]), *numbers, loss, f"{model['seconds']:.0f}"]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Return a table in Markdown, whose first columns, `words` of them, are not numbers."""
    rule = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def pictures(record: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the pictures of a record; return them by file name."""
    found = {}
    for name, result in record["results"].items():
        for file, systems in zip(picture_names(record, name), _groups(record), strict=False):
            found[file] = _picture(record, name, result, systems)
    return found


def picture_names(record: Mapping[str, Any], name: str) -> list[str]:
    """Return the files of the pictures of what was measured on some texts."""
    stem = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-") or "texts"
    groups = _groups(record)
    return [f"{stem}.png"] if len(groups) == 1 else [f"{stem}-{number}.png" for number in range(1, len(groups) + 1)]


def _groups(record: Mapping[str, Any]) -> list[list[str]]:
    """Return the systems of each picture: all in one, or group by group if there are too many."""
    systems, most = record["systems"], _MOST_CURVES
    groups: dict[str, list[str]] = {}
    for name, system in systems.items():
        groups.setdefault(system["group"] if len(systems) > most else "", []).append(name)
    return [part for group in groups.values() for part in _evenly(group, most)]


def _evenly(names: list[str], most: int) -> list[list[str]]:
    """Cut a list into parts of about equal size, none larger than `most`."""
    parts = -(-len(names) // most)
    size = -(-len(names) // parts)
    return [names[start : start + size] for start in range(0, len(names), size)]


def _picture(record: Mapping[str, Any], name: str, result: Mapping[str, Any], systems: Sequence[str]) -> Figure:
    title = f"{record['published']['where']} of {record['published']['id']}, {record['preset']['name']}: {name}"
    measure = record["measure"]
    if record["perplexity"]:
        return _perplexities(record, result, systems, title)
    last = record["columns"][-1] if measure == "resolution" else record["columns"][0]
    curves = {system: torch.tensor(result["curves"][system][last], dtype=torch.float64) for system in systems}
    if measure == "receptive_field":
        fields = {
            system: ReceptiveField(curve[None, None], [len(curve) - 1], 0.99, None, record["training_length"])
            for system, curve in curves.items()
        }
        return plots.receptive_fields(fields, title=title)
    return plots.attention_expectation(curves, title=title, training_length=record["training_length"])


def _perplexities(record: Mapping[str, Any], result: Mapping[str, Any], systems: Sequence[str], title: str) -> Figure:
    """Draw systems, and the reference wherever it was measured: differences of every picture are from it."""
    reference = record["reference"] if record["reference"] in record["systems"] else None
    if reference is not None:
        systems = list(dict.fromkeys([reference, *systems]))
    curves: dict[str, dict[int, float]] = {system: {} for system in systems}
    intervals: dict[str, dict[int, tuple[float, float]]] = {system: {} for system in systems}
    for system in systems:
        for column, cell in result["cells"][system].items():
            length = record["lengths"][column]
            curves[system][length] = _shown(record, cell["mean"])
            if cell["seed_interval"] is not None:
                intervals[system][length] = _ends(record, cell["seed_interval"])
    return plots.perplexity_by_length(
        curves, record["training_length"], title=title, intervals=intervals, reference=reference
    )

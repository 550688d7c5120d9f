"""Push the folder of a saved model to the Hub: what goes, what stays, and one commit for all of it."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import _http, set_client_factory, validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from yaml import YAMLError  # type: ignore[import-untyped]

from lex_hf.evaluation.loading import check_checkpoint
from lex_hf.model import modeling_lex
from lex_hf.model.modeling_lex import AUTO_MAP
from lex_hf.records import read_json

CARD_NAME = "README.md"
TIMEOUT = 60.0  # seconds that the Hub may be silent
CODE_OF_LEX_HF = "code, added from lex_hf"  # what files are that a push adds
_PACKAGE = Path(modeling_lex.__file__).parent  # where they are
SAVE_AGAIN = "load the model with AutoModelForCausalLM.from_pretrained and save it with model.save_pretrained"

# What is sent beside weights and code, by its path in the folder; all that is not named here stays.
_SENT = {
    "configuration": (CONFIG_NAME, "generation_config.json"),
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "*.model",
        "chat_template.jinja",
        "additional_chat_templates/*.jinja",
    ),
    "card": (CARD_NAME, "record.json", "recipe.yaml", "LICENSE*", "NOTICE*", "CITATION.cff"),
}
_PICTURES = {".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp"}

# Why files and folders of these names stay, wherever they lie; the first that fits.
_STAYS = {
    "hidden": (".*",),
    "checkpoint of a training run": ("checkpoint-*",),
    "log of a training run": ("runs", "logs", "wandb", "*.log", "*tfevents*", "trainer_state.json"),
    "state of a training run": ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "training_args.bin"),
    "half-written": ("*.partial", "*.tmp", "*.incomplete", "*.lock"),
    "pickle, which can run code when it is loaded": (
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.pkl",
        "*.pickle",
        "*.joblib",
    ),
    "weights that the model does not load": ("*.safetensors", "*.safetensors.index.json"),
    "code that the model does not need": ("*.py", "__pycache__"),
}

_MALFORMED = re.compile("improperly formatted|Malformed response|Invalid server response")  # by huggingface_hub

# Weights that transformers would find in a repository, by name.
_WEIGHTS = (
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    "model-?????-of-?????.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model-?????-of-?????.bin",
)


@dataclass(frozen=True)
class FolderFile:
    """A file in the folder of a model, or a whole folder in it of which nothing is sent.

    Attributes:
        path: Relative to the folder of the model, with `/` between names, and at the end of a folder.
        size: Bytes.
        sent: Whether a push sends it.
        what: What it is (`"weights"`, `"code"`, `"tokenizer"`, …) or, if it is not sent, why.
    """

    path: str
    size: int
    sent: bool
    what: str


def push_folder(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload model",
    create_pr: bool = False,
    token: str | None = None,
    timeout: float = TIMEOUT,
) -> CommitInfo:
    """Push a saved model to the Hub in one commit, so that a repository never holds half of it.

    Weights already there that the new ones replace are deleted in the same commit: a `model.safetensors` left over
    beside new shards would be loaded in their place. All else in the repository stays. The code that loading without
    lex_hf needs is added where the folder has none; the folder itself is never changed.

    Args:
        folder: What `save_pretrained` of a model, and of its tokenizer, wrote, and a model card, `README.md`.
        repo_id: Repository, as `"user/name"`; it is made if it does not exist.
        private: Make the repository private; one that is there and public is refused.
        revision: Branch; it is made if it does not exist. `None` means `main`.
        message: First line of the commit message.
        create_pr: Open a pull request instead of committing to `main`.
        token: Token with write access; `None` means that of `hf auth login` or `HF_TOKEN`.
        timeout: Seconds to wait for the Hub while it neither takes nor sends a byte.

    Returns:
        The commit: `oid`, `commit_url` and, with `create_pr`, `pr_url`. If nothing changed, the last one.

    Raises:
        ValueError: If the folder or an option is refused, see [`examine_folder`] and [`check_push`], before anything
            is sent; if `private` and the repository is public; or if what answers is no Hub.
        huggingface_hub.errors.HfHubHTTPError: If the Hub refuses (401: token, 403: access, …).
        huggingface_hub.errors.HTTPError: If the connection breaks; the Hub then has the whole commit or none.
        RuntimeError: If it breaks during the upload of a large file, in spite of retries; there is no commit then.
    """
    files = files_to_push(folder)
    check_push(folder, repo_id, revision=revision, create_pr=create_pr, message=message)
    api, root = HfApi(token=token), Path(folder)
    with _patience(timeout), _answers_of_a_hub(repo_id):
        repo = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(repo).private:
            raise ValueError(
                f"{repo} is there already, and public: make it private in its settings first, or push without private."
            )
        if revision is not None and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        homes = {CODE_OF_LEX_HF: _PACKAGE}
        sent = [CommitOperationAdd(file.path, homes.get(file.what, root) / file.path) for file in files]
        names = {file.path for file in files}
        # Weights that would be loaded beside those sent, or in their place.
        replaced = [path for path in api.list_repo_files(repo, revision=revision) if _fits(path, _WEIGHTS)]
        deleted = [CommitOperationDelete(path) for path in replaced if path not in names]
        # Not upload_folder: it cuts long uploads into several commits.
        return api.create_commit(
            repo, [*sent, *deleted], commit_message=message, revision=revision, create_pr=create_pr
        )


def files_to_push(folder: str | Path) -> list[FolderFile]:
    """List what [`push_folder`] would send; see [`examine_folder`]."""
    return [file for file in examine_folder(folder) if file.sent]


def examine_folder(folder: str | Path) -> list[FolderFile]:
    """List what is in the folder of a model, with what is sent and what stays; nothing is sent by accident.

    Sent are the configuration, the weights that would be loaded, the code that `auto_map` names and all it imports
    (that of the installed lex_hf, if the folder has none), the tokenizer, the model card, licences and pictures.
    Checkpoints, states and logs of a training run, pickles, half-written and hidden files stay, like all else, and so
    do links that lead out of the folder. (In the cache of the Hub a folder of `snapshots` is one with the `blobs` that
    its links lead to.)

    Args:
        folder: What `save_pretrained` wrote.

    Returns:
        First what is sent, then what stays; each in the order of paths.

    Raises:
        ValueError: If the folder does not hold a LEX model, in safetensors, whole, with all weights of the model that
            its configuration describes and no others, or with a part only of the code that loading without lex_hf
            needs.
    """
    root = Path(folder)
    config = _check_config(root)
    # Code that the folder has was saved with it, perhaps by another version: the two belong together, and files of two
    # versions need not fit each other. So its own is sent as it is, or refused if a file is missing; none is replaced.
    home = root if any(os.path.lexists(root / name) for name in _code(_PACKAGE)) else _PACKAGE
    code = _code(home)
    needed = dict.fromkeys(_weights(root), "weights") | dict.fromkeys(code if home == root else (), "code")
    _check_links(root, (CONFIG_NAME, *needed))
    if "quantization_config" not in config:  # such weights have other names and shapes
        check_checkpoint(_architecture(root, config), str(root))
    files = list(_examine(root, "", needed))
    if home != root:
        files += [FolderFile(name, (home / name).stat().st_size, sent=True, what=CODE_OF_LEX_HF) for name in code]
    return sorted(files, key=lambda file: (not file.sent, file.path))


def check_push(
    folder: str | Path,
    repo_id: str,
    *,
    revision: str | None = None,
    create_pr: bool = False,
    message: str = "Upload model",
) -> None:
    """Check the rest of what a push needs, without network.

    A model card is needed, because without one nobody can tell what the model is, or whether they may use it.

    Raises:
        ValueError: If the repository's name is malformed, `create_pr` and `revision` are both given, the message
            is empty, or the folder has no model card with a front matter.
    """
    validate_repo_id(repo_id)
    if not message.strip():
        raise ValueError(f"message = {message!r}: the commit needs a message.")
    if create_pr and revision is not None:
        raise ValueError(f"A pull request is opened against main: leave out create_pr, or revision = {revision!r}.")
    card = Path(folder, CARD_NAME)
    example = "begin it with, for example, three lines '---', 'license: apache-2.0', '---', and describe the model"
    if not card.is_file():
        raise ValueError(
            f"{folder} has no model card: `lex-hf card` makes one, or write a {CARD_NAME} yourself; {example}."
        )
    _check_links(Path(folder), [CARD_NAME])
    try:
        front_matter = metadata_load(card)
    except (ValueError, YAMLError) as error:
        raise ValueError(f"The front matter of {card} cannot be read: {' '.join(str(error).split())}.") from error
    if not front_matter:
        raise ValueError(f"{card} has no front matter: {example}.")


@contextmanager
def plain_errors(repo_id: str) -> Iterator[None]:
    """Turn what the Hub or the connection raises during a push into a ValueError of a sentence or two."""
    try:
        yield
    except (HTTPError, RuntimeError) as error:  # RuntimeError is what huggingface_hub makes of a broken upload
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise ValueError(_explain(cause, repo_id)) from error


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Give up on a Hub that is silent; huggingface_hub would wait for ever."""
    make_client = _http._GLOBAL_CLIENT_FACTORY  # perhaps the user's own

    def limit(request: Any) -> None:
        limits = request.extensions["timeout"].items()
        request.extensions["timeout"] = {name: seconds if limit is None else limit for name, limit in limits}

    def make_impatient_client() -> Any:
        client = make_client()
        # Not client.timeout: some requests say themselves that they wait for ever.
        client.event_hooks = client.event_hooks | {"request": [*client.event_hooks["request"], limit]}
        return client

    set_client_factory(make_impatient_client)
    try:
        yield
    finally:
        set_client_factory(make_client)


@contextmanager
def _answers_of_a_hub(repo_id: str) -> Iterator[None]:
    """Say so if what answers is no Hub, but a proxy, a page to log in, another server."""
    try:
        yield
    except Exception as error:  # huggingface_hub takes answers apart without looking at them first
        understood = isinstance(error, HTTPError | OSError | ValueError | RuntimeError)
        not_json = isinstance(error, json.JSONDecodeError | UnicodeDecodeError | RecursionError)
        if understood and not not_json and not _MALFORMED.search(str(error)):
            raise
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise ValueError(
            f"The push to {repo_id} broke off: {constants.ENDPOINT} gave an answer that a Hub does not give "
            f"({detail}). Check HF_ENDPOINT, and whether a proxy or a login page answers in its place; look at the "
            "repository before you push again."
        ) from error


def _explain(error: BaseException, repo_id: str) -> str:
    detail = " ".join(str(error).split())
    if not isinstance(error, HfHubHTTPError):
        return (
            f"The push to {repo_id} broke off ({type(error).__name__}: {detail}). The Hub takes a push whole or not "
            "at all: run the same command again."
        )
    status, answer = error.response.status_code, error.server_message or detail
    if status == 401:
        return (
            f"The Hub does not accept the token, or there is none (401: {answer}): log in with `hf auth login`, or "
            "set HF_TOKEN to a token with write access."
        )
    if status == 403:
        return (
            f"The token may not write to {repo_id} (403: {answer}): use a token with write access, or open a pull "
            "request with --create-pr."
        )
    return f"The Hub refused the push to {repo_id} ({status}: {answer}); nothing was published."


def _check_config(root: Path) -> dict[str, Any]:
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder: give the folder that model.save_pretrained wrote.")
    path = root / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{root} has no {CONFIG_NAME}, so it is not the folder of a saved model.")
    config = _read_object(path)
    model_type = config.get("model_type")
    if model_type != "lex":
        raise ValueError(f"{path} has model_type = {model_type!r}: only LEX models ('lex') are pushed.")
    saved = config.get("auto_map")
    missing = [name for name, target in AUTO_MAP.items() if not isinstance(saved, dict) or saved.get(name) != target]
    if missing:
        raise ValueError(
            f"auto_map in {path} lacks {', '.join(missing)}, which loading without lex_hf needs: {SAVE_AGAIN}."
        )
    return config


def _architecture(root: Path, config: Mapping[str, Any]) -> Any:
    """The class of the model that was saved."""
    named = config.get("architectures")
    known = [target.split(".")[1] for name, target in AUTO_MAP.items() if name != "AutoConfig"]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise ValueError(
            f"{root / CONFIG_NAME} has architectures = {named!r}: it must name one of {', '.join(known)}."
        )
    return getattr(modeling_lex, named[0])


def _weights(root: Path) -> set[str]:
    """Names of the files that hold the weights, as transformers looks for them: one file, or an index and shards."""
    index, shards = root / SAFE_WEIGHTS_INDEX_NAME, set[str]()
    if (root / SAFE_WEIGHTS_NAME).is_file():
        shards = {SAFE_WEIGHTS_NAME}
    elif index.is_file():
        places = _read_object(index).get("weight_map")
        shards = set(map(str, places.values())) if isinstance(places, dict) else set()
    if not shards:
        raise ValueError(f"{root} has no weights as safetensors: {SAVE_AGAIN}.")
    for name in sorted(shards):
        _check_shard(root / name, index)
    return shards if shards == {SAFE_WEIGHTS_NAME} else {*shards, index.name}


def _check_shard(path: Path, index: Path) -> None:
    if path.suffix != ".safetensors" or path.parent != index.parent or not path.is_file():
        raise ValueError(f"{index} names {path.name}, which is no safetensors file in the folder: {SAVE_AGAIN}.")
    try:
        with safe_open(path, framework="pt"):  # reads the header, and compares it with the size of the file
            pass
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}): save the model again.") from error


def _code(root: Path) -> set[str]:
    """Names of the code files that `auto_map` names, and of all that they import from each other."""
    modules = {root / f"{target.split('.')[0]}.py" for target in AUTO_MAP.values()}
    try:
        imported = {Path(file) for module in modules for file in get_relative_import_files(module)}
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise ValueError(f"{root} has no {name}, which loading without lex_hf needs: {SAVE_AGAIN}.") from error
    return {file.name for file in modules | imported}


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return content


def _check_links(root: Path, needed: Iterable[str]) -> None:
    for name in needed:
        link = _leading_out(root, root / name)
        if link is not None:
            raise ValueError(f"{root / name} is a {link}: put the file itself in its place.")


def _leading_out(root: Path, path: Path) -> str | None:
    """Return what to say of a link to a file that is not in the folder, or is hidden there; `None` for other files."""
    if not path.is_symlink():
        return None
    home, target = root.resolve(), path.resolve()
    # In the cache of huggingface_hub, REPOSITORY/snapshots/REVISION/NAME leads to REPOSITORY/blobs/HASH.
    if home.parent.name == "snapshots" and target.parent == home.parents[1] / "blobs":
        return None
    if target.is_relative_to(home) and not any(part.startswith(".") for part in target.relative_to(home).parts):
        return None
    return f"link that leads out of the folder or to a hidden file, {target}"


def _examine(root: Path, prefix: str, needed: dict[str, str]) -> Iterator[FolderFile]:
    """Judge what lies in `root / prefix`."""
    for path in (root / prefix).iterdir():
        name = prefix + path.name
        stays = next((why for why, patterns in _STAYS.items() if _fits(path.name, patterns)), None)
        if path.is_dir():
            # A link could lead anywhere, also back here.
            inside = [] if path.is_symlink() else list(_examine(root, f"{name}/", needed))
            if not stays and any(file.sent for file in inside):
                yield from inside
            else:
                size = sum(file.size for file in inside)
                yield FolderFile(_printable(f"{name}/"), size, sent=False, what=stays or "no part of a saved model")
        else:
            yield _judge(root, path, name, needed, stays)


def _judge(root: Path, path: Path, name: str, needed: dict[str, str], stays: str | None) -> FolderFile:
    size = path.stat().st_size if path.is_file() else 0
    what = needed.get(name)
    if what is None and not stays and path.is_file():
        is_picture = path.suffix.lower() in _PICTURES
        what = "picture" if is_picture else next((kind for kind, names in _SENT.items() if _fits(name, names)), None)
    link = _leading_out(root, path) if what else None
    if link:
        what, stays = None, link
    if what and _printable(name) != name:
        what, stays = None, "its name is not UTF-8"
    return FolderFile(_printable(name), size, sent=what is not None, what=what or stays or "no part of a saved model")


def _printable(name: str) -> str:
    """Escape bytes of a name that are not UTF-8, which neither a terminal nor the Hub takes."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _fits(path: str, patterns: Iterable[str]) -> bool:
    # A star stands for part of a name, never for a folder.
    return any(fnmatchcase(path, pattern) and path.count("/") == pattern.count("/") for pattern in patterns)

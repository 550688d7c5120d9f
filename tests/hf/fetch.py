"""Fetch the tests that transformers shares between its models, of the very version that is installed.

They are in its source distribution, which leaves out some modules that they import. Of those, what LEX needs is in the
`stand_in_` files beside this one, and the rest is empty.

    python tests/hf/fetch.py FOLDER  # leaves the package `tests` in FOLDER/transformers-VERSION
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).parent

# What the distribution leaves out, by paths in its folder `tests`.
STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "pipelines/__init__.py": "",
    "utils/__init__.py": "",
    "utils/tiny_model_summary.json": "{}\n",  # `suite_lex.py` makes the models of pipelines
    # Any values of a few general fields that differ from their defaults.
    "utils/test_configuration_utils.py": (
        "import torch\n\n"
        "config_common_kwargs = {\n"
        '    "return_dict": False,\n'
        '    "output_hidden_states": True,\n'
        '    "dtype": torch.float16,\n'
        '    "chunk_size_feed_forward": 5,\n'
        '    "architectures": ["LexModel"],\n'
        '    "id2label": {0: "label"},\n'
        '    "label2id": {"label": 0},\n'
        '    "problem_type": "regression",\n'
        "}\n"
    ),
    # Tests of pipelines import transformers from here; empty, it is the installed one.
    "../src/transformers/__init__.py": "",
}
COPIES = {
    "distributed_testing_utils.py": "stand_in_distributed.py",
    **{
        f"pipelines/test_pipelines_{task}.py": "stand_in_pipelines.py"
        for task in (
            "feature_extraction",
            "text_classification",
            "text_generation",
            "token_classification",
            "zero_shot",
        )
    },
}


def fetch(folder: Path) -> Path:
    """Download and unpack the tests, unless they are there; write the stand-ins anew.

    Args:
        folder: Where the tests of all versions are kept.

    Returns:
        The folder that holds the package `tests`.

    Raises:
        subprocess.CalledProcessError: If pip finds no source distribution of this version.
    """
    name = f"transformers-{transformers.__version__}"
    target = folder / name
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            _unpack(_download(Path(temporary)), Path(temporary))
            (Path(temporary) / name).rename(target)
    tests = target / "tests"
    for path, text in STAND_INS.items():
        (tests / path).parent.mkdir(parents=True, exist_ok=True)
        (tests / path).write_text(text, encoding="utf-8")
    for path, source in COPIES.items():
        shutil.copyfile(HERE / source, tests / path)
    return target


def _download(folder: Path) -> Path:
    """Let pip download the source distribution; it reads its metadata, and builds nothing."""
    requirement = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "transformers"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=True, stdout=sys.stderr)
    (archive,) = folder.glob("transformers-*.tar.gz")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the tests and the licence, with nothing outside of `folder`."""
    with tarfile.open(archive) as tar:
        files = (member for member in tar if member.isfile())
        wanted = [file for file in files if file.name.partition("/")[2].startswith(("tests/", "LICENSE"))]
        tar.extractall(folder, members=wanted, filter="data")


if __name__ == "__main__":
    sys.stdout.write(f"{fetch(Path(sys.argv[1]).resolve())}\n")

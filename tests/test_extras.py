"""The light core: what `pip install lex-hf` brings is enough for models, and errors name the extra for all else."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers.core_only import PROJECT, link_packages, required
from helpers.models import tiny_model
from helpers.rope_models import rope_model
from packaging.requirements import Requirement

import lex_hf
from lex_hf.lazy import Extras, MissingPackageError

SOURCES = Path(lex_hf.__file__).parents[1]

WORKS = """
import lex_hf, torch
from transformers import AutoConfig, AutoModelForCausalLM

ids = torch.arange(1, 41)[None] % 61
model = AutoModelForCausalLM.from_pretrained("lex")
assert type(model) is lex_hf.LexForCausalLM
llama = AutoModelForCausalLM.from_pretrained("llama")
for each in (model, lex_hf.blockwise(llama, 8, sinks=1)):
    tokens = each.generate(ids, max_new_tokens=30, do_sample=False)
    assert torch.equal(each.generate(ids, max_new_tokens=30, do_sample=False, use_cache=False), tokens)
    options = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(each.generate(ids, max_new_tokens=30, do_sample=False, **options), tokens)
    cache = each(ids, use_cache=True).past_key_values
    lex_hf.save_cache(cache, each, "cache.safetensors")
    assert lex_hf.load_cache("cache.safetensors", each).get_seq_length() == 40
    each.train()(ids, labels=ids, use_cache=False).loss.backward()
lex_hf.restore(llama)
model.save_pretrained("again")
lex_hf.LexForSequenceClassification(AutoConfig.from_pretrained("again"))
print("works")
"""

# What is asked for, and the extra that the error names.
NEEDS = {
    "from lex_hf import check_positions": "eval",
    "from lex_hf import measure_recall": "eval",
    "from lex_hf.evaluation.perplexity import compute_perplexity": "eval",
    "import lex_hf; lex_hf.from_gpt2": "eval",
    "from lex_hf.training import train": "train",
    "from lex_hf.training.recipes import Recipe": "train",
    "from lex_hf.evaluation.plots import plot_curves": "plot",
}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and in `packages` all that the core brings."""
    folder = tmp_path_factory.mktemp("core")
    tiny_model(tie_word_embeddings=True).save_pretrained(folder / "lex")
    rope_model().save_pretrained(folder / "llama")
    (folder / "packages").mkdir()
    link_packages(folder / "packages", PROJECT["dependencies"])
    return folder


def run(core: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with nothing on the path but the standard library, the core's packages and the sources."""
    path = f"import sys; sys.path[:0] = {[str(core / 'packages'), str(SOURCES)]}\n"
    command = [sys.executable, "-I", "-S", "-c", path + code]
    return subprocess.run(command, cwd=core, capture_output=True, text=True)


@pytest.mark.processes
def test_models_need_the_core_alone(core: Path) -> None:
    brought = {name for extra in lex_hf._EXTRAS.values() for name in extra}
    missing = brought - {path.name for path in (core / "packages").iterdir()}
    assert {"accelerate", "datasets", "evaluate", "matplotlib", "scipy"} <= missing
    done = run(core, WORKS)
    assert done.stdout == "works\n", done.stderr


@pytest.mark.processes
def test_what_is_missing_is_named_with_its_extra(core: Path) -> None:
    tries = "\n".join(f"asked({code!r})" for code in NEEDS)
    done = run(
        core, f"def asked(code):\n    try: exec(code)\n    except ModuleNotFoundError as error: print(error)\n{tries}"
    )
    said = done.stdout.splitlines()
    assert len(said) == len(NEEDS), done.stderr
    for line, extra in zip(said, NEEDS.values(), strict=True):
        assert (
            f"The extra {extra!r} brings it: pip install 'lex-hf[{extra}]' (or 'lex-hf[all]' for everything)." in line
        )
        assert line.startswith("lex_hf.")


@pytest.mark.processes
def test_the_command_line_says_what_it_needs(core: Path) -> None:
    block = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name == "typer":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
sys.argv = ["lex-hf", "--help"]
from lex_hf.cli import main
main()
"""
    done = run(core, block)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: lex_hf.cli.")
    assert done.stderr.endswith(
        " needs typer, which is not installed. The extra 'cli' brings it: pip install 'lex-hf[cli]' (or 'lex-hf[all]' "
        "for everything).\n"
    )


def test_the_extras_are_those_of_the_project() -> None:
    modules = {"pyyaml": "yaml"}
    for extra, listed in lex_hf._EXTRAS.items():
        names = {Requirement(each).name for each in PROJECT["optional-dependencies"][extra]}
        direct = {modules.get(name, name) for name in names - {"lex-hf"}}  # what it takes of other extras
        assert direct | ({"pyarrow"} & set(listed)) == set(listed)
        assert {name for name in listed if name == "pyarrow"} <= required(list(names)).keys()
    [everything] = PROJECT["optional-dependencies"]["all"]
    assert Requirement(everything).extras == {*lex_hf._EXTRAS, "serve"}


def test_other_errors_of_importing_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("")
    (tmp_path / "outer" / "train_it.py").write_text("import heavy_thing.part")
    (tmp_path / "outer" / "other.py").write_text("import unknown_thing")
    (tmp_path / "outer" / "between.py").write_text("import outer.train_it")
    monkeypatch.syspath_prepend(str(tmp_path))
    extras = Extras("outer", "the-outer", {"first": ["heavy_thing"], "train": ["heavy_thing"]})
    monkeypatch.setattr(sys, "meta_path", [extras, *sys.meta_path])
    with pytest.raises(
        MissingPackageError, match=r"^outer.train_it needs heavy_thing, .* 'the-outer\[train\]'"
    ) as error:
        __import__("outer.train_it")
    assert error.value.name == "heavy_thing"
    with pytest.raises(MissingPackageError, match=r"^outer.between needs heavy_thing, .* 'the-outer\[first\]'"):
        __import__("outer.between")
    with pytest.raises(ModuleNotFoundError, match="No module named 'unknown_thing'") as other:
        __import__("outer.other")
    assert type(other.value) is ModuleNotFoundError
    for name in [name for name in sys.modules if name.partition(".")[0] == "outer"]:
        del sys.modules[name]

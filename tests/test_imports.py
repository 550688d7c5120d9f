"""What importing the package does: little, but LEX is registered with the Auto classes in any order of imports."""

import ast
import importlib
import pkgutil
import runpy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.forks import LIBRARIES, PACKAGE
from helpers.models import tiny_model

import lex_hf
from lex_hf.lazy import AfterImport, exports


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def run_with_pytorch(code: str, *arguments: str) -> str:
    """Run code where PyTorch is imported already, but nothing of Hugging Face."""
    result = LIBRARIES.run("-c", textwrap.dedent(code), *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.mark.processes
def test_importing_the_package_imports_no_library() -> None:
    heavy = ("torch", "transformers", "huggingface_hub", "numpy", "typer", "rich", "gradio")
    assert run(f"import sys, lex_hf; print([name for name in {heavy} if name in sys.modules])") == "[]"


@pytest.mark.parametrize("arguments", ["--help", "--version", "train --help", "reproduce --help", "app --help"])
def test_help_imports_no_library(arguments: str) -> None:
    code = """
    import atexit, sys
    from lex_hf.cli import main
    heavy = ("torch", "transformers", "huggingface_hub", "numpy", "datasets", "gradio")
    atexit.register(lambda: print([name for name in heavy if name in sys.modules]))
    sys.argv = ["lex-hf", *sys.argv[1:]]
    main()
    """
    assert run(code, *arguments.split()).endswith("[]")


@pytest.mark.processes
@pytest.mark.parametrize(
    "imports",
    [
        "from transformers import AutoConfig, AutoModelForCausalLM\nimport lex_hf",
        "import lex_hf\nfrom transformers import AutoConfig, AutoModelForCausalLM",
        # modeling_layers imports modeling_auto when it has not yet defined what modeling_lex imports from it.
        "import transformers, lex_hf\nfrom transformers.modeling_layers import GradientCheckpointingLayer",
        "from lex_hf import *\nfrom transformers import pipeline",
    ],
)
def test_lex_is_registered_whatever_is_imported_first(imports: str, model: Path) -> None:
    rest = """
    import multiprocessing, pickle, sys
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForQuestionAnswering, CONFIG_MAPPING

    def main():
        folder = sys.argv[1]
        config = AutoConfig.from_pretrained(folder)
        print(type(pickle.loads(pickle.dumps(config))).__module__, "lex" in CONFIG_MAPPING)
        print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
        print(type(AutoModelForQuestionAnswering.from_config(config)).__name__)
        print([type(finder).__name__ for finder in sys.meta_path if type(finder).__name__ == "AfterImport"])

    main()
    """
    printed = run_with_pytorch(f"{imports}\n{textwrap.dedent(rest)}", str(model)).splitlines()
    expected = ["lex_hf.model.configuration_lex True", "LexForCausalLM", "LexForQuestionAnswering", "[]"]
    assert printed == expected


@pytest.mark.processes
def test_a_configuration_alone_needs_no_model(model: Path) -> None:
    code = """
    import sys, lex_hf
    from transformers import AutoConfig
    print(type(AutoConfig.from_pretrained(sys.argv[1])).__name__, "lex_hf.model.modeling_lex" in sys.modules)
    """
    assert run_with_pytorch(code, str(model)) == "LexConfig False"


@pytest.mark.processes
def test_a_spawned_process_knows_lex(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, sys
        import lex_hf

        def vocabulary(model):
            from transformers import AutoModelForCausalLM
            return model.config.vocab_size, type(AutoModelForCausalLM.from_config(model.config)).__name__

        if __name__ == "__main__":
            model = lex_hf.LexForCausalLM.from_pretrained(sys.argv[1])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(*pool.apply(vocabulary, (model,)))
        """)
    )
    done = PACKAGE.run(script, model)
    assert done.stdout == "97 LexForCausalLM\n", done.stderr


# The lists of names


def test_the_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    tree = ast.parse(Path(lex_hf.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    checked = {
        name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert checked == lex_hf._NAMES
    assert sorted(lex_hf.__all__) == lex_hf.__all__ == sorted({*checked, "metric_path"})
    for name, module in checked.items():
        assert getattr(lex_hf, name) is getattr(importlib.import_module(f"lex_hf.{module}"), name)
    rooms = {path.parent.name for path in Path(lex_hf.__file__).parent.glob("*/__init__.py")}
    assert set(lex_hf._ROOMS) == rooms


@pytest.mark.parametrize("name", sorted({*lex_hf._ROOMS, *lex_hf._MOVED} - {"static_cache_lex"}))
def test_modules_are_attributes_of_the_package(name: str) -> None:
    """As they were in 0.1.0 under their old names, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = getattr(lex_hf, name)
    assert module is sys.modules[f"lex_hf.{lex_hf._MOVED.get(name, name)}"]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `outer`, of which `outer.layers` imports `outer.registry` before it is whole itself."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("")
    (tmp_path / "outer" / "registry.py").write_text("ENTRIES = []\n")
    (tmp_path / "outer" / "layers.py").write_text("from . import registry\nLAYER = 1\n")
    (tmp_path / "outer" / "single.py").write_text("NUMBER = 7\n")
    (tmp_path / "outer" / "broken.py").write_text("from . import registry\nraise ValueError('broken')\n")
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "outer"]:
        del sys.modules[name]


def _register() -> None:
    from outer.layers import LAYER  # type: ignore[import-not-found]
    from outer.registry import ENTRIES  # type: ignore[import-not-found]

    ENTRIES.append(LAYER)


@pytest.mark.parametrize("first", ["outer.layers", "outer.registry"])
def test_a_function_waits_until_all_that_imports_its_module_is_whole(first: str, package: Path) -> None:
    waiting = AfterImport({"outer.registry": _register}, packages=["outer"])
    waiting.install()
    importlib.import_module("outer")
    assert waiting in sys.meta_path
    assert pkgutil.get_data("outer", "layers.py") == b"from . import registry\nLAYER = 1\n"
    assert runpy.run_module("outer.single")["NUMBER"] == 7
    module = importlib.import_module(first)
    assert sys.modules["outer.registry"].ENTRIES == [1]
    assert waiting not in sys.meta_path
    assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_a_function_is_called_at_once_if_its_module_is_there(package: Path) -> None:
    registry = importlib.import_module("outer.registry")
    AfterImport({"outer.registry": _register}, packages=["outer"]).install()
    assert registry.ENTRIES == [1]


def test_a_function_is_called_also_if_what_imports_its_module_fails(package: Path) -> None:
    AfterImport({"outer.registry": _register}, packages=["outer"]).install()
    with pytest.raises(ValueError, match="broken"):
        importlib.import_module("outer.broken")
    assert sys.modules["outer.registry"].ENTRIES == [1]


def test_modules_and_names_are_imported_when_they_are_used(package: Path) -> None:
    get, names = exports("outer", {"LAYER": "layers"}, modules=["registry"])
    importlib.import_module("outer")
    assert {"LAYER", "registry"} <= set(names())
    assert "outer.layers" not in sys.modules
    assert get("LAYER") == 1
    assert get("registry") is sys.modules["outer.registry"]
    with pytest.raises(AttributeError, match="module 'outer' has no attribute 'nothing'"):
        get("nothing")

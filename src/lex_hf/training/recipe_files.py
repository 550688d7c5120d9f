"""Recipe files: YAML as people read it, those that come with the package, and the paper's optimiser."""

import difflib
import re
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

_PRESETS = Path(__file__).with_name("presets")
# Fields of an optimiser and its schedule, apart from the number of steps.
SCHEDULE = ("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs")
_OPTIMIZER = (*SCHEDULE, "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "max_grad_norm")


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return sorted(file.stem for file in _PRESETS.glob("*.yaml"))


def read_recipe(name: str | Path) -> Any:
    """Read the YAML of a recipe: one that comes with the package, by its name, or a file.

    Raises:
        ValueError: If there is no such recipe, or it is not valid YAML in UTF-8.
    """
    where = str(name)
    path = Path(name)
    if where in recipe_names():
        path = _PRESETS / f"{where}.yaml"
    elif not path.is_file() or path.suffix not in (".yaml", ".yml"):
        raise ValueError(_no_recipe(where))
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a recipe: it is not UTF-8 text (byte {error.start}).") from error
    return parse_yaml(text, where)


def lex_optimizer() -> dict[str, Any]:
    """Return the optimiser and schedule of the LEX paper (the recipe `gpt-medium`), as `TrainingArguments` fields."""
    training = read_recipe("gpt-medium")["training"]
    return {name: training[name] for name in _OPTIMIZER}


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML in which 1e-4 is a number, yes and no are words, and duplicate keys are errors.

    Raises:
        ValueError: If it is not valid; the message begins with `where`.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the last two: endless numbers and brackets
        raise ValueError(f"{where}: invalid YAML: {error}") from error


def _no_recipe(name: str) -> str:
    shipped = ", ".join(recipe_names())
    close = difflib.get_close_matches(name, recipe_names(), n=1)
    if Path(name).exists():
        return (
            f"{name} is not a recipe, which is a .yaml file or one of {shipped}. To train on {name}, name a recipe "
            f"first: lex-hf train tiny {name} --output DIR."
        )
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"There is no recipe {name!r}.{hint} A recipe is one of {shipped}, or the path of a .yaml file."


class _Loader(yaml.SafeLoader):
    """YAML as people read it: 1e-4 is a number, yes and no are words, and duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, unless a key would be lost."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        duplicate = [key for index, key in enumerate(keys) if key in keys[:index]]
        if duplicate:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {duplicate[0]!r}", node.start_mark)
        return super().construct_mapping(node, deep)


_BOOL, _FLOAT = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOL, re.compile(r"true|false"), list("tf"))
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|nan)$"), list("-+.0123456789")
)

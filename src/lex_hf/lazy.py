"""Names that are imported on first use, and modules that have moved: importing the package costs next to nothing."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def exports(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a package whose names are imported on first use.

    Args:
        package: `__name__` of the package.
        names: For each name the module it comes from, relative to the package.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names})


class MovedModules:
    """A finder of modules under the names that they had in an earlier version; it warns of them.

    Args:
        package: `__name__` of the package.
        modules: New name of each module by its old one, both relative to the package.
    """

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._modules = {f"{package}.{old}": f"{package}.{new}" for old, new in modules.items()}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that loads the module from its new place, if `name` is an old name."""
        return ModuleSpec(name, _Moved(self._modules[name])) if name in self._modules else None


class _Moved(Loader):
    """A loader that returns a module which has moved."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module from its new place."""
        message = f"{spec.name} is now {self._name}: import it from there."
        warnings.warn(message, DeprecationWarning, stacklevel=2)  # frames of the import system do not count
        module = importlib.import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""
        module.__spec__ = self._spec  # the import system has set that of the old name

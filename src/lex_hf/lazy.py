"""Imports that wait, modules that moved, and packages that are missing: what the package does to the import system."""

import contextlib
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def exports(
    package: str, names: Mapping[str, str], *, modules: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` (PEP 562) of a package whose names are imported on first use.

    Args:
        package: `__name__` of the package.
        names: For each name the module that defines it, relative to the package.
        modules: Modules of the package that are imported when they are used as attributes of it.
    """

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *names, *modules})


class Watcher:
    """Finder that executes modules of some packages itself, those that the finders behind it find.

    Args:
        packages: Names of the packages.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        """Return the spec that another finder has for a module of the packages, with a loader that tells this one."""
        if not any(f"{name}.".startswith(f"{package}.") for package in self._packages):
            return None
        finders = list(sys.meta_path)
        behind = finders.index(self) + 1 if self in finders else 0  # another thread may have taken it away
        for finder in finders[behind:]:
            spec = finder.find_spec(name, *where)
            if spec is not None:
                if spec.loader is not None:  # a package without __init__.py has none
                    spec.loader = _Noticed(spec.loader, self)
                return spec
        return None

    def execute(self, loader: Loader, module: ModuleType) -> None:
        """Execute a module."""
        raise NotImplementedError


class AfterImport(Watcher):
    """Finder that calls functions once modules of other packages have been imported.

    A module may be imported by another that is only half executed at that moment and that the function needs whole,
    as transformers' `modeling_layers` imports `modeling_auto`. So a function is called when its module and all modules
    of `packages` that were importing it have been executed.

    Args:
        functions: The function to call by the name of the module it waits for.
        packages: Names of packages that a function must not find half executed.
    """

    def __init__(self, functions: Mapping[str, Callable[[], None]], *, packages: Sequence[str]) -> None:
        super().__init__(packages)
        self._functions = dict(functions)
        self._thread = threading.local()  # each has a chain of imports of its own

    def install(self) -> None:
        """Call the functions whose modules are there, and wait for the others."""
        sys.meta_path.insert(0, self)
        self._call()

    def execute(self, loader: Loader, module: ModuleType) -> None:
        """Execute a module, and call what has been waiting for it if nothing else is being executed."""
        depth = getattr(self._thread, "depth", 0)
        self._thread.depth = depth + 1
        try:
            loader.exec_module(module)
        finally:
            self._thread.depth = depth
            if depth == 0:  # also after an error: the module waited for may be whole, and is not imported again
                self._call()

    def _call(self) -> None:
        for name in [name for name in self._functions if name in sys.modules]:
            function = self._functions.pop(name, None)  # first: what it imports ends here again
            if function is not None:
                function()
        if not self._functions:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)


class MissingPackageError(ModuleNotFoundError):
    """A package that an extra brings is not installed; the message names the extra."""


class Extras(Watcher):
    """Finder that makes a missing package, which a module of ours imports, an error that names an extra.

    Args:
        package: `__name__` of our package.
        distribution: The name under which pip knows it.
        extras: Modules at top level that each extra brings. Of several extras that bring a module, the one is named
            with which the name of our own module begins, else the first.
    """

    def __init__(self, package: str, distribution: str, extras: Mapping[str, Collection[str]]) -> None:
        super().__init__([package])
        self._distribution, self._extras = distribution, extras

    def execute(self, loader: Loader, module: ModuleType) -> None:
        """Execute a module.

        Raises:
            MissingPackageError: If it imports what is not installed and comes with an extra.
        """
        try:
            loader.exec_module(module)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            bringing = [name for name, modules in self._extras.items() if missing in modules]
            if not bringing:
                raise
            own = module.__name__.removeprefix(f"{self._packages[0]}.")
            extra = next((name for name in bringing if own.startswith(name)), bringing[0])
            raise MissingPackageError(  # also where one was raised: of modules that import each other the first counts
                f"{module.__name__} needs {missing}, which is not installed. The extra {extra!r} brings it: "
                f"pip install '{self._distribution}[{extra}]' (or '{self._distribution}[all]' for everything).",
                name=error.name,
            ) from (error.__cause__ or error)


class _Noticed(Loader):
    """Loader of a module that lets a [`Watcher`] execute it."""

    def __init__(self, loader: Loader, watcher: Watcher) -> None:
        self._loader = loader
        self._watcher = watcher

    def __getattr__(self, name: str) -> Any:
        """Return what else the loader has, e.g. `get_code`, which runs a module as a program."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as its own loader does, which it has from then on."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:  # as far as the type is concerned
            module.__spec__.loader = self._loader
        self._watcher.execute(self._loader, module)


class MovedModules(Loader):
    """Finder and loader of modules under the names that they had in an earlier version; it warns.

    Args:
        package: `__name__` of the package.
        modules: New name of each module by its old one, both relative to the package.
    """

    def __init__(self, package: str, modules: Mapping[str, str]) -> None:
        self._modules = {f"{package}.{old}": f"{package}.{new}" for old, new in modules.items()}

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        """Return a spec that loads the module from its new place, if `name` is an old name."""
        return ModuleSpec(name, self) if name in self._modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module from its new place."""
        message = f"{spec.name} is now {self._modules[spec.name]}: import it from there."
        warnings.warn(message, DeprecationWarning, stacklevel=2)  # frames of the import system do not count
        module = importlib.import_module(self._modules[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is, with its own spec: the import system has set that of the old name."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

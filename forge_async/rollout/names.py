"""Whether the reward functions and the environment that a config names are there, without running a line of them.

They are imported later, rewards by workers (:mod:`forge_async.rollout.reward_worker`), the environment once the run has
its folder; a misspelt name is told before that, and before an engine is started.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import PathFinder
from pathlib import Path

from forge_async.errors import ConfigError, prefix_errors
from forge_async.rollout.config import RewardConfig

EXTRAS = ("openenv", "verifiers")
"""Packages whose environments are named ``package:name``."""


def check_names(reward: RewardConfig, environment: str, folder: str | None = None) -> None:
    """Find the modules, ``folder`` (default: the working directory) after everything installed, and read their sources.

    What only running the module would tell (a name that it makes on import, a module without a source) passes.

    Args:
        environment: ``rollout.environment``; "" is none.
    Raises:
        ConfigError: there is no such module, function or class, or the module is no Python.
    """
    folder = folder or os.getcwd()
    with prefix_errors("reward"):
        for index, spec in enumerate(reward.specs):
            check_name(f"functions[{index}]", spec.function, "function", folder)
    with prefix_errors("rollout"):
        if (kind := environment.partition(":")[0]) in EXTRAS:
            if not find_module(kind, folder)[0]:
                raise ConfigError("environment", environment, "an environment that is installed", install(kind))
        elif environment:
            check_name("environment", environment, "Class", folder)


def install(extra: str) -> str:
    """What to do about an environment's package that is missing."""
    return f"Install the extra: pip install 'forge-async[{extra}]'; docs/rollout.md says which releases."


def check_name(key: str, value: str, what: str, folder: str) -> None:
    """Raise ConfigError where ``value``, ``module:name`` of a ``what``, is not there; see :func:`check_names`."""
    module, _, name = value.partition(":")
    found, source = find_module(module, folder)
    if not found:
        allowed = f"module:{what} with an importable module"
        raise ConfigError(key, value, allowed, f"There is no {module} in {folder}.")
    if source is None or source.suffix != ".py":
        return
    try:
        names = set(names_of(ast.parse(source.read_bytes()).body))
    except SyntaxError as error:
        remedy = f"{source}, line {error.lineno}: {error.msg}."
        raise ConfigError(key, value, "a module that imports", remedy) from error
    if name not in names and not names & {"*", "__getattr__"}:
        near = get_close_matches(name, names, 1)
        remedy = f"Did you mean {module}:{near[0]}?" if near else f"It has: {', '.join(sorted(names)) or 'nothing'}."
        raise ConfigError(key, value, f"a {what.lower()} of {source}", remedy)


def find_module(name: str, folder: str) -> tuple[bool, Path | None]:
    """Whether there is such a module, and its source where it has one. No package on the way to it is imported."""
    if name in sys.modules and name != "__main__":  # also those that only code makes, such as os.path
        return True, None if not (file := getattr(sys.modules[name], "__file__", None)) else Path(file)
    first, *rest = name.split(".")
    finders = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((spec for spec in finders if spec is not None), None) or PathFinder.find_spec(first, [folder])
    if spec is None:
        return False, None
    source = Path(spec.origin) if spec.has_location and spec.origin else None
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    for part in rest:
        if any(found for place in places for found in place.glob(f"{part}.*.so")):
            return True, None
        packages = [place / part for place in places if (place / part).is_dir()]
        sources = [package / "__init__.py" for package in packages] + [place / f"{part}.py" for place in places]
        source = next((path for path in sources if path.is_file()), None)
        if source is None and not packages:
            return False, None
        places = packages if source is None else [source.parent] * (source.name == "__init__.py")
    return True, source


def names_of(body: Sequence[ast.stmt]) -> Iterator[str]:
    """What the statements of a module define or import; ``*`` where they import everything of another."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
                elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield inner.name  # below an `if` or a `try`
                elif isinstance(inner, ast.Import | ast.ImportFrom):
                    yield from (alias.asname or alias.name for alias in inner.names)

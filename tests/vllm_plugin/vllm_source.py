"""vLLM's own source, read from its wheel: no import, no installation. `make test` downloads the wheel into .vllm."""

from __future__ import annotations

import ast
import functools
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


@functools.cache
def wheel() -> zipfile.ZipFile:
    found = sorted((ROOT / ".vllm").glob("vllm-*.whl"))
    assert found, (
        "vLLM's wheel is not in .vllm: run `make test`, which downloads it (pip download vllm==0.33.0 --no-deps)"
    )
    return zipfile.ZipFile(found[-1])


@functools.cache
def module(name: str) -> ast.Module:
    path = name.replace(".", "/")
    names = set(wheel().namelist())
    file = f"{path}.py" if f"{path}.py" in names else f"{path}/__init__.py"
    return ast.parse(wheel().read(file))


def definition(module_name: str, name: str) -> ast.FunctionDef | ast.ClassDef:
    """The function, class or ``Class.method`` called ``name`` in a module, or in the module it is imported from."""
    tree: ast.AST = module(module_name)
    *path, leaf = name.split(".")
    for part in path:
        tree = _child(tree, part)
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == leaf for alias in node.names):
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == leaf)
            return definition(str(node.module), original)
    return _child(tree, leaf)


def parameters(module_name: str, name: str) -> tuple[str, ...]:
    arguments = definition(module_name, name).args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _child(tree: ast.AST, name: str) -> ast.FunctionDef | ast.ClassDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"vLLM has no {name} where it is looked for")

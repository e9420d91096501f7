"""The closed list of compiled kernels: what may be launched, and the record of what was.

A room's ``tuning.py`` names its variants as data; its launcher runs them through ``run`` and nothing else. So the list
that compiles offline for sm_80 and sm_86 is the list that serves, and a variant outside it cannot be launched.
Nothing heavy is imported with this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

from deepinfer_sm80.errors import TensorContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ALIGNMENT = 16  # bytes; every pointer argument is compiled as aligned to it, and checked at launch
INTERPRETER = "triton.runtime.interpreter"

launched: set[str] = set()
"""Keys of the variants launched in this process."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled form of one Triton kernel.

    ``kernel``: "module:function" of a ``triton.jit`` function whose integer arguments are all in ``do_not_specialize``.
    ``arguments``: run-time arguments in order with their Triton types ("*bf16", "*u8", "*i32", "i32", "i64", "fp32").
    ``constants``: the constexpr arguments. ``may_spill``: the measured reason why spilled registers are accepted.
    ``unaligned``: pointers that may start at any element, such as a slice of a batch's lengths. They are compiled
    without ALIGNMENT, and named in the kernel's ``do_not_specialize_on_alignment``.
    """

    op: str
    name: str
    kernel: str
    arguments: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 2
    may_spill: str = ""
    unaligned: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return f"{self.op}/{self.name}"

    def function(self) -> Any:
        module, _, name = self.kernel.partition(":")
        return getattr(import_module(module), name)


def run(variant: Variant, grid: tuple[int, ...], *arguments: Any) -> None:
    """Launch ``variant`` over ``grid``; ``arguments`` in the order of ``variant.arguments``.

    Raises TensorContractError for a pointer that is not 16-byte aligned: another alignment would compile another kernel
    in the middle of serving.
    """
    for name, value in zip(variant.arguments, arguments, strict=True):
        if hasattr(value, "data_ptr") and name not in variant.unaligned and value.data_ptr() % ALIGNMENT:
            raise TensorContractError(
                op=variant.op,
                name=name,
                expected=f"aligned to {ALIGNMENT} bytes",
                got=f"an address {value.data_ptr() % ALIGNMENT} bytes past that",
            )
    launched.add(variant.key)
    function = variant.function()
    options = {**variant.constants, "num_warps": variant.num_warps, "num_stages": variant.num_stages}
    if type(function).__module__ == INTERPRETER:
        # infinity and NaN are results that the references state too; only the interpreter's numpy remarks on them
        with import_module("numpy").errstate(over="ignore", invalid="ignore"):
            function[grid](*arguments, **options)
    else:
        function[grid](*arguments, **options)


def all_variants() -> Iterator[Variant]:
    """Every variant of every room that has kernels, in registry order. Imports no kernel."""
    from deepinfer_sm80 import ops

    for op, family in ops.OPS.items():
        package = import_module(f"{ops.__name__}.{family}.{op}")
        for found in walk_packages(package.__path__):
            if found.name == "tuning":
                tuning = import_module(f"{package.__name__}.tuning")
                listed: Callable[[], Iterator[Variant]] | None = getattr(tuning, "variants", None)
                if listed is not None:
                    yield from listed()

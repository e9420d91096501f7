"""Compile every kernel variant for Ampere without a GPU and read what it needs: shared memory, registers, spills.

Uses the ptxas and cuobjdump that come with Triton. Works with any Triton that is importable, beside torch or alone.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_sm80.hardware import LIMITS, limits
from deepinfer_sm80.ops.variants import ALIGNMENT, Variant

if TYPE_CHECKING:
    from collections.abc import Iterable

_FOREIGN_PTX = re.compile(r"e4m3|e5m2|wgmma|tcgen05|mbarrier|cp\.async\.bulk|griddepcontrol|setmaxnreg|stmatrix")
_APPROXIMATE_PTX = re.compile(r"\b(?:rsqrt|sqrt|rcp|div|ex2|lg2|sin|cos|tanh)\.(?:approx|full)")
_PTXAS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True, slots=True)
class Resources:
    """What one variant needs on one architecture; sizes in bytes, registers per thread."""

    op: str
    variant: str
    arch: str
    triton: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    ctas_per_sm: int
    foreign: tuple[str, ...]
    """PTX of newer GPUs or native FP8 found in the code: must be empty."""
    approximate: tuple[str, ...] = ()
    """PTX whose result is not the rounded one, such as ``rsqrt.approx``: none where a contract is exact."""


def compile_variant(variant: Variant, capability: tuple[int, int]) -> Resources:
    """Compile ``variant`` for ``capability`` such as (8, 0) and read its resources. Needs triton and no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = list(variant.arguments)
    signature = {**variant.arguments, **dict.fromkeys(variant.constants, "constexpr")}
    attributes = {
        (i,): [["tt.divisibility", ALIGNMENT]]
        for i, name in enumerate(names)
        if variant.arguments[name].startswith("*") and name not in variant.unaligned
    }
    source = ASTSource(fn=variant.function(), signature=signature, constexprs=dict(variant.constants), attrs=attributes)
    arch = capability[0] * 10 + capability[1]
    built = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    ptx = built.asm["ptx"]
    stack, spill, registers = assemble(ptx, arch)
    shared = int(built.metadata.shared)
    return Resources(
        op=variant.op,
        variant=variant.name,
        arch=f"sm_{arch}",
        triton=triton.__version__,
        shared_bytes=shared,
        registers=registers,
        spill_bytes=spill,
        stack_bytes=stack,
        ctas_per_sm=limits(capability).ctas_that_fit(shared, registers, variant.num_warps),
        foreign=tuple(sorted(set(_FOREIGN_PTX.findall(ptx)))),
        approximate=tuple(sorted(set(_APPROXIMATE_PTX.findall(ptx)))),
    )


def compile_all(
    variants: Iterable[Variant], architectures: Iterable[tuple[int, int]] = tuple(LIMITS), workers: int = 2
) -> list[Resources]:
    """``compile_variant`` for every pair, in parallel, in the order given."""
    pairs = [(variant, arch) for variant in variants for arch in architectures]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(lambda pair: compile_variant(*pair), pairs))


def assemble(ptx: str, arch: int) -> tuple[int, int, int]:
    """(stack bytes, spilled bytes, registers) as ptxas reports them for sm_``arch``."""
    import triton.backends.nvidia

    ptxas = Path(triton.backends.nvidia.__path__[0]) / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", f"-arch=sm_{arch}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, stores, loads = map(int, _PTXAS.findall(report)[-1])
    return stack, stores + loads, int(_REGISTERS.findall(report)[-1])

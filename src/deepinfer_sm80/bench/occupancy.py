"""As many CTAs on an SM as compute capability 8.0 would hold, on a GPU whose SMs hold more.

A kernel's launch asks for dynamic shared memory; asking for more than it uses bounds how many CTAs fit. Triton has no
option for it, but launches with the number in its compiled kernel's metadata, which is replaced here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepinfer_sm80.hardware import limits
from deepinfer_sm80.ops import resources, warmup

if TYPE_CHECKING:
    from deepinfer_sm80.hardware import Capability, Limits
    from deepinfer_sm80.ops.variants import Variant

_OF_CUDA = 1024  # shared memory that CUDA keeps for itself in every CTA
_UNIT = 128


def padded_bytes(needed: int, ctas: int, sm: Limits) -> int:
    """Shared memory per CTA with which no more than ``ctas`` of them fit an SM, at least ``needed``."""
    most = sm.smem_per_sm // ctas - _OF_CUDA
    return max(needed, min(most, sm.smem_per_cta) // _UNIT * _UNIT)


def limit(variant: Variant, capability: Capability, here: Limits) -> bool:
    """Launches of ``variant`` occupy an SM as on ``capability``; True where that needed padding.

    The kernel must have been compiled for ``capability`` and may have been launched: it is loaded anew. ``here``: the
    limits of this GPU's SM, for which the assembler may have given a thread other registers than for ``capability``.
    """
    compiled = warmup.compile_variant(variant)
    shared = int(compiled.metadata.shared)
    registers = resources.assemble(compiled.asm["ptx"], capability[0] * 10 + capability[1])[2]
    wanted = limits(capability).ctas_that_fit(shared, registers, variant.num_warps)
    if wanted < 1 or here.ctas_that_fit(shared, _registers(compiled), variant.num_warps) <= wanted:
        return False
    _replace_shared(compiled, padded_bytes(shared, wanted, here))
    return True


def _registers(compiled: Any) -> int:
    """Of one thread, as the loaded kernel says."""
    compiled._init_handles()
    return int(compiled.n_regs)


def _replace_shared(compiled: Any, shared: int) -> None:
    from triton.compiler.compiler import make_backend

    compiled.metadata = compiled.metadata._replace(shared=shared)
    compiled.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(compiled.metadata)
    compiled.module = compiled.function = compiled._run = None

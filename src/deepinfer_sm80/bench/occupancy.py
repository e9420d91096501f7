"""As many CTAs on an SM as compute capability 8.0 would hold, on a GPU whose SMs hold more.

A kernel's launch asks for dynamic shared memory; asking for more than it uses bounds how many CTAs fit. Triton has no
option for it, but launches with the number in its compiled kernel's metadata, which is replaced here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

    Until then the compiled kernel may have been launched: it is loaded anew. ``here``: the limits of this GPU's SM.
    """
    wanted = resources.compile_variant(variant, capability)
    compiled = warmup.compile_variant(variant)
    shared = int(compiled.metadata.shared)
    if wanted.ctas_per_sm < 1 or here.ctas_that_fit(shared, wanted.registers, variant.num_warps) <= wanted.ctas_per_sm:
        return False
    _replace_shared(compiled, padded_bytes(shared, wanted.ctas_per_sm, here))
    return True


def _replace_shared(compiled: Any, shared: int) -> None:
    from triton.compiler.compiler import make_backend

    compiled.metadata = compiled.metadata._replace(shared=shared)
    compiled.packed_metadata = make_backend(compiled.metadata.target).pack_metadata(compiled.metadata)
    compiled.module = compiled.function = compiled._run = None

"""How a TextModel computes: what it may leave out, to show that a checkpoint notices, and what differs elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_sm80.errors import UnsupportedOptionError

COMPONENTS = {
    "attention": "attention adds nothing",
    "sinks": "no sink in the denominator",
    "window": "every earlier row of the layer's own keys is seen, not the last 128",
    "index_selection": "the first rows instead of the chosen ones",
    "candidates": "layers behind the candidate source choose among all rows",
    "compressor_softmax": "two tokens are averaged, not pooled by a softmax",
    "engram": "no n-gram rows",
    "mhc_mixing": "streams keep to themselves: the stream-to-stream matrix is the identity",
    "delayed_premix": "a sublayer collapses the streams with its own coefficients, not its predecessor's",
    "router_bias": "experts are chosen by their score alone",
    "shared_expert": "routed experts only",
    "clamp": "gate and up values of experts are not clamped",
}


KV_PROFILES = {
    "fp8_584": "vLLM off SM100: 584-byte rows, e4m3 index vectors",
    "sm100": "vLLM on SM100: 528-byte rows, e4m3 index vectors",
    "official": "the released model definition: e4m3 window rows, e2m1 compressed rows and index vectors",
}


@dataclass(frozen=True)
class Switches:
    """Raises UnsupportedOptionError for a name that is not listed.

    disable           names out of COMPONENTS
    kv_profile        name out of KV_PROFILES: how key rows and index vectors are rounded (``cache``)
    activation_quant  inputs of FP8 and FP4 matrices are rounded to e4m3 with a power of two per 32, as on SM100 and in
                      the released definition; vLLM on Ampere and Hopper leaves them bfloat16. wo_a's input never is
    bounded_replay    vLLM's default ``swa_bounded_replay``: large prefill steps run the layers behind the last KV
                      source for their last 128 rows only, and a prefix hit computes 128 rows again (``replay``)
    """

    disable: frozenset[str] = frozenset()
    kv_profile: str = "fp8_584"
    activation_quant: bool = False
    bounded_replay: bool = False

    def __post_init__(self) -> None:
        unknown = sorted(self.disable - COMPONENTS.keys())
        if unknown:
            raise UnsupportedOptionError(
                option="disable", found=unknown, allowed=f"any of {', '.join(COMPONENTS)}", remedy="Check the spelling."
            )
        if self.kv_profile not in KV_PROFILES:
            allowed = f"one of {', '.join(KV_PROFILES)}"
            raise UnsupportedOptionError(
                option="kv_profile", found=repr(self.kv_profile), allowed=allowed, remedy="Check the spelling."
            )

    def has(self, component: str) -> bool:
        """Whether ``component`` is left in."""
        return component not in self.disable

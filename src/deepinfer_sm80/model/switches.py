"""What a TextModel may leave out, to show that a checkpoint notices."""

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


@dataclass(frozen=True)
class Switches:
    """``disable``: names out of COMPONENTS. Raises UnsupportedOptionError for any other."""

    disable: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = sorted(self.disable - COMPONENTS.keys())
        if unknown:
            raise UnsupportedOptionError(
                option="disable", found=unknown, allowed=f"any of {', '.join(COMPONENTS)}", remedy="Check the spelling."
            )

    def has(self, component: str) -> bool:
        """Whether ``component`` is left in."""
        return component not in self.disable

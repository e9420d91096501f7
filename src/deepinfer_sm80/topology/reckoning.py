"""How the speeds of a plan were estimated, in words: formulas, inputs with their sources, what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.topology import measured, roofline
from deepinfer_sm80.topology.cluster import NETWORK

if TYPE_CHECKING:
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.layout import Setting
    from deepinfer_sm80.topology.search import Row


def lines(row: Row, cluster: Cluster, setting: Setting) -> list[str]:
    """The formulas, what goes into them for ``row``, and what was measured."""
    speed = row.estimate
    return [
        "How the speeds are estimated:",
        *(f"  {line}" for line in roofline.FORMULAS),
        *(f"  {line}" for line in inputs(cluster)),
        f"  {row.layout.name}: {speed.rows:,.0f} rows in a pass, passes: {speed.passes} ({setting.streams} streams, "
        f"speculation {setting.speculation})",
        f"  they reach {speed.reached:.0f} routed experts a layer and read {speed.read:.2f} GiB, a rank of each stage "
        f"together; collectives: {speed.collectives}, hops: {speed.hops}",
        *measured.lines(cluster.gpu),
    ]


def inputs(cluster: Cluster) -> list[str]:
    """The figures of card and links and the constants, each with where it is from."""
    gpu, links = cluster.gpu, [cluster.link, *([NETWORK] if cluster.hosts > 1 else [])]
    return [
        f"card (data sheet): {gpu.bandwidth:,.0f} GB/s x {roofline.BANDWIDTH_SHARE:g} (assumed), "
        f"{gpu.tflops:g} TFLOP/s x {roofline.PREFILL_SHARE:g} (fitted to one published run)",
        *(f"{link.name} ({link.source}): {link.rate:g} GB/s, {link.latency:g} us" for link in links),
        f"hand-over of a hop (measured between two NVIDIA H200): {roofline.HAND_OVER * 1e6:g} us",
        f"overhead of a layer's small kernels (assumed): {roofline.LAYER_OVERHEAD * 1e6:g} us",
    ]

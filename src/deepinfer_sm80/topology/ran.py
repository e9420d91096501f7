"""What has not run to its end with this plugin, the one place that says so.

``plan``, ``plan --smallest``, docs/05 and the README's commands and limits follow it (``make docs``);
tests/topology/test_ran.py holds it against the committed results of benchmarks/results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_sm80.topology.cluster import HOST_GPUS

if TYPE_CHECKING:
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.layout import Layout

REPLICAS = False  # data parallel
RAY = False  # several hosts
GPUS = 2  # the most at a time

NO_REPLICAS = "Data parallel replicas have never run with this plugin (plan --dp 1 leaves them out)."
NEVER = "has never run with this plugin"


def cautions(layout: Layout, cluster: Cluster) -> list[str]:
    """Sentences to put beside the command of ``layout``: what in it never ran, or is taken as given."""
    said = [NO_REPLICAS] if layout.dp > 1 and not REPLICAS else []
    if cluster.hosts > 1:
        said.append(f"The command needs a Ray cluster of the {cluster.hosts} hosts{'' if RAY else f', which {NEVER}'}.")
    elif cluster.count > HOST_GPUS:
        said.append(
            f"The command takes all {cluster.count} GPUs to be in one host; over several (--hosts) it uses Ray"
            f"{'' if RAY else f', which {NEVER}'}."
        )
    return said

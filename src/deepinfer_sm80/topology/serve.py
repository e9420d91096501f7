"""The ``vllm serve`` line of a layout, or why there is none; where Engram's tables go."""

from __future__ import annotations

import enum
import json
import operator
import shlex
from typing import TYPE_CHECKING

from deepinfer_sm80.topology.layout import legal_stock

if TYPE_CHECKING:
    from deepinfer_sm80.model.config import ModelConfig
    from deepinfer_sm80.topology.cluster import Cluster
    from deepinfer_sm80.topology.layout import Layout, Memory, Setting

# What this package's plugin adds to vLLM 0.33.0's pipelines. Change them with the plugin: the commands follow.
SOURCE_REPLICAS = False  # a stage holds its own copy of a KV source that an earlier stage owns
DRAFT_OVER_PIPELINE = False  # DSpark with more than one stage, which vLLM refuses
HOST_RESERVE = 16.0  # GiB of RAM for the system and, below, each rank's process (assumed)
RANK_RESERVE = 2.0


class Standing(enum.IntEnum):
    """How near a layout is to being served, the nearest first."""

    SERVABLE = 0  # vLLM has a command
    REPLICAS = 1  # a command once source replicas are placed
    NONE = 2  # vLLM has no command


def standing(config: ModelConfig, layout: Layout, cluster: Cluster) -> tuple[Standing, str]:
    """How near ``layout`` is to being served whatever its memory, and why vLLM has no command; empty where it has."""
    if not layout.uniform:
        return Standing.NONE, "vLLM gives every stage the same tensor-parallel size, so there is no command for this"
    if _unplaceable(layout, cluster):
        return Standing.NONE, (
            "under Ray vLLM puts whole replicas on a host or whole hosts under a replica: replicas of "
            f"{layout.gpus // layout.dp} GPUs and hosts of {cluster.per_host} are neither"
        )
    if not legal_stock(config, layout) and not SOURCE_REPLICAS:
        return (
            Standing.REPLICAS,
            "a cut inside a KV-sharing group needs source replicas, which stock vLLM does not place",
        )
    return Standing.SERVABLE, ""


def _unplaceable(layout: Layout, cluster: Cluster) -> bool:
    """Replicas that vLLM 0.33.0 cannot spread over the hosts (``vllm/v1/engine/utils.py``, placement groups)."""
    replica, host = layout.gpus // layout.dp, cluster.per_host
    return cluster.hosts > 1 and layout.dp > 1 and host % replica != 0 and replica % host != 0


def notes(layout: Layout, setting: Setting) -> str:
    """What the command leaves out; empty where nothing."""
    if layout.pp > 1 and setting.speculation and not DRAFT_OVER_PIPELINE:
        return (
            "the command is without speculation, which vLLM refuses over a pipeline (its memory and time are counted)"
        )
    return ""


def command(layout: Layout, setting: Setting, cluster: Cluster, checkpoint: str, engram: str) -> str:
    """The line that serves ``layout``. Expects equal stages."""
    words: list[object] = ["vllm", "serve", checkpoint, "--tensor-parallel-size", layout.tp]
    if layout.pp > 1:
        words += ["--pipeline-parallel-size", layout.pp]
    if layout.dp > 1:
        words += ["--data-parallel-size", layout.dp]
    if layout.ep > 1:
        words.append("--enable-expert-parallel")
    if cluster.hosts > 1:
        words += ["--distributed-executor-backend", "ray"]
        words += _replicas_over_hosts(layout, cluster)
    words += ["--max-model-len", setting.context, "--max-num-batched-tokens", setting.batched_tokens]
    words += ["--max-num-seqs", setting.streams, "--gpu-memory-utilization", f"{setting.utilisation:g}"]
    words += ["--engram-config", json.dumps(_engram(layout, cluster, engram))]
    words += ["--limit-mm-per-prompt", json.dumps({"image": 0})]
    if setting.speculation and not notes(layout, setting):
        draft = {"method": "dspark", "model": checkpoint, "num_speculative_tokens": setting.speculation}
        words += ["--speculative-config", json.dumps(draft)]
    line = " ".join(shlex.quote(str(word)) for word in words)
    if cluster.hosts > 1 and layout.dp > 1 and layout.gpus // layout.dp > cluster.per_host:
        line = f"VLLM_RAY_DP_PACK_STRATEGY=span {line}"
    if layout.pp > 1:
        line = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, layout.split))} {line}"
    return line


def _engram(layout: Layout, cluster: Cluster, engram: str) -> dict[str, bool]:
    """Huge pages are of private tables only. With them vLLM would cut the tables by columns over the replicas of a host
    as well, with collectives in each step, and not start where there are too few columns (``cuts_columns``)."""
    if engram != "host":
        return {"cpu_offload": False}
    return {"dp_shared_memory": True} if replicas_on_host(layout, cluster) > 1 else {"use_thp": True}


def replicas_on_host(layout: Layout, cluster: Cluster) -> int:
    """Whole data-parallel replicas on a host; 0 where one spans hosts."""
    return min(layout.dp, cluster.per_host // (layout.gpus // layout.dp))


def cuts_columns(config: ModelConfig, layout: Layout, cluster: Cluster) -> bool:
    """Whether vLLM can cut the tables over the tensor-parallel ranks of all replicas of a host, as it does where they
    do not share them: equal shares, rounded up, have to leave columns for the last rank."""
    shards = layout.tp * max(1, replicas_on_host(layout, cluster))
    return (shards - 1) * -(-config.engram_columns // shards) < config.engram_columns or not config.engram_layer_ids


def sharing(config: ModelConfig, layout: Layout, tables: tuple[float, ...], cluster: Cluster) -> str:
    """What a host needs where its replicas share tables in RAM; empty where none do."""
    together, size = replicas_on_host(layout, cluster), sum(map(operator.mul, tables, layout.tp_per_stage))
    if together < 2 or not size:
        return ""
    otherwise = "splits them over the replicas, which costs time in each step"
    return (
        f"The {together} replicas of a host share Engram's tables: {size:.0f} GiB must be free in its /dev/shm "
        "(docker run: --shm-size or --ipc=host; Linux gives /dev/shm half of the RAM, mount -o remount,size= more); "
        f"where less is, vLLM {otherwise if cuts_columns(config, layout, cluster) else 'does not start'}."
    )


def _replicas_over_hosts(layout: Layout, cluster: Cluster) -> list[object]:
    """vLLM takes all replicas to be on the first host unless it is told how many are; where one spans hosts it counts
    by itself."""
    if layout.dp == 1:
        return []
    here = cluster.per_host // (layout.gpus // layout.dp)
    return ["--data-parallel-backend", "ray", *(["--data-parallel-size-local", here] if here else [])]


def ram_needed(layout: Layout, tables: tuple[float, ...], cluster: Cluster) -> float:
    """GiB of RAM the fullest host needs: Engram's tables of its ranks, once for data-parallel replicas that share the
    host, and the processes."""
    return host_tables(layout, tables, cluster) + processes(cluster)


def host_tables(layout: Layout, tables: tuple[float, ...], cluster: Cluster) -> float:
    """GiB of Engram's tables on the fullest host, were they in RAM."""
    need, replica = 0.0, sum(layout.tp_per_stage)
    for host in range(cluster.hosts):
        ranks = range(host * cluster.per_host, (host + 1) * cluster.per_host)
        held = {rank % replica for rank in ranks}
        stage_of = [i for i, tp in enumerate(layout.tp_per_stage) for _ in range(tp)]
        need = max(need, sum(tables[stage_of[r]] for r in held))
    return need


def processes_fit(cluster: Cluster) -> bool:
    """Whether a host has RAM for the system and the ranks' processes, without any table."""
    return cluster.ram is None or processes(cluster) * 2**30 <= cluster.ram


def processes(cluster: Cluster) -> float:
    """GiB of a host that the system and the ranks' processes take."""
    return HOST_RESERVE + RANK_RESERVE * cluster.per_host


def tables_may_be_on_gpu(config: ModelConfig, layout: Layout, cluster: Cluster) -> bool:
    """Whether the processes fit, vLLM can cut the tables, and the plugin serves them on the GPU: replicas of TP 1 would
    share one over peer GPUs, which it refuses."""
    peers = layout.tp == 1 and layout.dp > 1
    return processes_fit(cluster) and not peers and cuts_columns(config, layout, cluster)


def placement(layout: Layout, found: Memory, cluster: Cluster) -> tuple[str, str]:
    """``host``, or ``disk`` with the reason: vLLM keeps the tables in RAM or on the GPU and has no third way."""
    need = ram_needed(layout, found.tables, cluster)
    if cluster.ram is None or need * 2**30 <= cluster.ram:
        return "host", ""
    has = f"GiB of RAM on a host that has {cluster.ram / 2**30:.0f}"
    if not processes_fit(cluster):
        return "disk", f"the processes alone need {processes(cluster):.0f} {has}, with Engram's tables {need:.0f}"
    return (
        "disk",
        f"Engram's tables and the processes need {need:.0f} {has}; vLLM has no form that reads them from disk",
    )

"""What joins an engine's GPUs gives: all-reduces as its layers ask for them, and hops as a pipeline hands rows over.

``all_reduces`` and ``hops`` run in each worker of a tensor-parallel engine, through ``LLM.collective_rpc`` with
VLLM_ALLOW_INSECURE_SERIALIZATION=1; both ranks call each at the same time. ``fitted`` makes the planner's two
constants of the times.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROWS = (1, 8, 64, 512, 2048)
CALLS, REPLAYS = 20, 10  # all-reduces in one graph, and replays of which the fastest counts
ROUNDS = 20  # hops there and back of which the median counts
RANKS = 2


def all_reduces(worker: Any, hidden: int, rows: Sequence[int] = ROWS) -> dict[str, float]:
    """Microseconds of one all-reduce of [rows, hidden] bfloat16 in a CUDA graph, by rows."""
    import torch
    from vllm.distributed import tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import graph_capture

    found = {}
    for count in rows:
        value = torch.ones(count, hidden, dtype=torch.bfloat16, device=worker.device)
        for _ in range(3):
            tensor_model_parallel_all_reduce(value.clone())
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        with graph_capture(worker.device) as context, torch.cuda.graph(graph, stream=context.stream):
            for _ in range(CALLS):
                kept.append(tensor_model_parallel_all_reduce(value.clone()))
        best = float("inf")
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end))
        if not all(bool((result == RANKS).all()) for result in kept):
            raise AssertionError(f"the sum over {RANKS} ranks of ones is not {RANKS} everywhere, at {count} rows")
        found[str(count)] = round(1e3 * best / CALLS, 3)
    return found


def hops(worker: Any, size: int, rows: Sequence[int] = ROWS) -> dict[str, float]:
    """Microseconds that one hand-over of [rows, size] bytes takes from rank to rank, by rows: half a round trip."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group, found = get_tp_group(), {}
    for count in rows:
        value = {"hidden_states": torch.ones(count, size // 2, dtype=torch.bfloat16, device=worker.device)}
        times = []
        for _ in range(ROUNDS + 2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            if worker.rank == 0:
                group.send_tensor_dict(value)
                group.recv_tensor_dict()
            else:
                group.send_tensor_dict(group.recv_tensor_dict())
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found[str(count)] = round(1e6 * sorted(times[2:])[ROUNDS // 2] / 2, 3)
    return found


def slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By rows, the time of the slowest of RANKS ranks. Raises AssertionError where one did not answer."""
    if len(ranks) != RANKS or any(rank.keys() != ranks[0].keys() for rank in ranks):
        raise AssertionError(f"not the answers of {RANKS} ranks about the same rows: {list(ranks)}")
    return {count: max(rank[count] for rank in ranks) for count in ranks[0]}


def fitted(times: Mapping[str, float], size: int) -> dict[str, float]:
    """The planner's constants of an all-reduce: the latency is the time of the fewest rows, the rate what more bytes
    cost. ``size``: bytes of a row that cross the link."""
    counts = sorted(map(int, times))
    few, many = counts[0], counts[-1]
    latency, more = times[str(few)], times[str(many)] - times[str(few)]
    if more <= 0:
        raise AssertionError(f"{many} rows took no longer than {few}: {dict(times)}")
    return {"latency_us": round(latency, 2), "gb_s": round((many - few) * size / more / 1e3, 1)}

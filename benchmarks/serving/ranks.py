"""What every rank of an engine did: the rows its layers chose, and what it handed to the next pipeline stage.

``watch`` and ``noted`` run in each worker, through ``LLM.collective_rpc``; that wants this folder on PYTHONPATH and
VLLM_ALLOW_INSECURE_SERIALIZATION=1. Eager engines only: a captured graph runs none of the code that is watched.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recording import Recorder


class Watched:
    """Of one process: ``recorder`` of its layers; ``sent``: (tokens, bytes) of every hand-over."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sent: list[tuple[int, int]] = []

    def note(self, tensors: dict[str, Any]) -> None:
        """A dictionary of tensors [tokens, ...] that leaves for the next stage."""
        parts = [value for value in tensors.values() if hasattr(value, "nbytes")]
        self.sent.append((len(parts[0]), sum(part.nbytes for part in parts)))


_here: list[Watched] = []


def watch(worker: Any) -> None:
    """Begin to note in this worker; wraps vLLM's classes the first time."""
    del worker
    if not _here:
        from recording import Recorder
        from vllm.distributed.parallel_state import GroupCoordinator

        watched = Watched(Recorder())
        watched.recorder.install()
        send = GroupCoordinator.isend_tensor_dict

        def send_and_note(group: Any, tensors: dict[str, Any], *args: Any, **named: Any) -> Any:
            if watched.recorder.active:
                watched.note(tensors)
            return send(group, tensors, *args, **named)

        GroupCoordinator.isend_tensor_dict = send_and_note
        _here.append(watched)
    _here[0].recorder.topk, _here[0].sent = {}, []
    _here[0].recorder.active = True


def noted(worker: Any) -> dict[str, Any]:
    """End it: ``rows``, a digest of the rows chosen per layer, and ``sent`` of this rank."""
    watched = _here[0]
    watched.recorder.active = False
    digests = {
        str(layer): hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16]
        for layer, rows in watched.recorder.topk.items()
    }
    return {"rank": worker.rank, "rows": digests, "sent": watched.sent}


def missing(ranks: list[dict[str, Any]], layers: tuple[int, ...], stages: int) -> str:
    """What the answers lack: every one of ``layers`` noted by all ranks of one of the pipeline's ``stages``, and what
    is handed over by all ranks but those of the last; "" if nothing."""
    wanted = len(ranks) // stages
    seen = {layer: sum(str(layer) in rank["rows"] for rank in ranks) for layer in layers}
    wrong = [f"layer {layer} by {count} instead of {wanted}" for layer, count in seen.items() if count != wanted]
    handing = sum(bool(rank["sent"]) for rank in ranks)
    if handing != len(ranks) - wanted:
        wrong.append(f"a hand-over by {handing} ranks instead of {len(ranks) - wanted}")
    return ", ".join(wrong)


def differing(ranks: list[dict[str, Any]]) -> list[str]:
    """Layers whose chosen rows are not the same on all ranks that hold the layer."""
    seen: dict[str, set[str]] = {}
    for rank in ranks:
        for layer, digest in rank["rows"].items():
            seen.setdefault(layer, set()).add(digest)
    return sorted((layer for layer, digests in seen.items() if len(digests) > 1), key=int)


def per_token(ranks: list[dict[str, Any]]) -> list[float]:
    """Bytes handed over per token, a value for each rank that handed anything over."""
    sent = [rank["sent"] for rank in ranks if rank["sent"]]
    return [sum(size for _, size in steps) / sum(tokens for tokens, _ in steps) for steps in sent]

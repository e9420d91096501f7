"""A prompt and then single tokens through the operators of one layer, in forward-pass order, each beside its reference.

A prompt goes through the prefill operators; every further token is written into the paged caches and read back by the
decode operators. Without a GPU the kernels run through Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.cli.demo_layer import BLOCK, SWA_BLOCK, Layer
from deepinfer_sm80.testing.agreement import Agreement, compare_with_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPT, DECODED = 80, 16  # tokens: Triton's interpreter needs about a minute for them
TOPK, TOPK_BLOCKS = 64, 9  # fewer rows and blocks than the prompt has, so that both choices matter
PREFILL, DECODE = "prefill", "decode"
ROUTE_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One operator on the prompt (``phase`` prefill) or on one token (decode), up to token ``last`` of the text.

    ``case`` names its sizes.
    """

    phase: str
    last: int
    case: str
    found: Agreement


def walk(directory: Path, device: str) -> Iterator[Step]:
    """Every operator on the prompt, then on each of DECODED tokens; a later one reads what an earlier one wrote."""
    layer = Layer(directory, device, PROMPT + DECODED)
    for first, last in ((0, PROMPT), *((p, p + 1) for p in range(PROMPT, PROMPT + DECODED))):
        yield from _Pass(layer, first, last).operators()


class _Pass:
    """Tokens ``first`` to ``last`` of the text."""

    def __init__(self, layer: Layer, first: int, last: int) -> None:
        self.layer, self.rows, self.count = layer, slice(first, last), last - first
        self.last = last
        self.phase = PREFILL if first == 0 else DECODE
        self.positions = layer.positions[self.rows]
        self.lens = (self.positions + 1).int()
        self.chosen = torch.empty(0)
        self.attended = torch.empty(0)

    def operators(self) -> Iterator[Step]:
        yield from self._residual_streams()
        yield from self._write_caches()
        yield from self._choose()
        yield from self._attend_prompt() if self.phase == PREFILL else self._attend_token()
        yield from self._project()
        yield from self._route()

    def _run(self, op: str, arguments: dict[str, Any]) -> Agreement:
        """The kernel, interpreted without a GPU; on a GPU what vLLM would run."""
        return compare_with_reference(op, arguments, None if self.layer.device == "cuda" else ops.kernel(op))

    def _step(self, case: str, found: Agreement) -> Step:
        return Step(self.phase, self.last, f"T{self.count}-{case}", found)

    def _residual_streams(self) -> Iterator[Step]:
        layer, rows = self.layer, self.rows
        heads = layer.engram_rows.shape[1]
        bounds = {"head_start": 0, "local_heads": heads, "vocab_start": 0, "vocab_end": layer.engram["weight"].shape[0]}
        lookup = {**layer.engram, "ids": layer.engram_rows[rows], **bounds}
        yield self._step(f"C{heads}", self._run("engram_lookup", lookup))
        mix = {"post_mix": layer.post[rows], "comb": layer.comb[rows]}
        arguments = {"x": layer.x[rows], "residual": layer.streams[rows], **mix}
        yield self._step(f"H{layer.config.hidden_size}", self._run("mhc_post", arguments))
        fused = {**arguments, "pre_mix": layer.pre[rows], **layer.next_mix}
        yield self._step(f"H{layer.config.hidden_size}", self._run("mhc_fused_post_pre_delayed", fused))

    def _write_caches(self) -> Iterator[Step]:
        layer, rows = self.layer, self.rows
        place = {"positions": self.positions, "slot_mapping": self.positions}
        shared = {"cos_sin_cache": layer.rope, "compress_ratio": 1, **place}
        for kind, latent, cache in (
            ("swa", layer.swa_latent, layer.swa_cache),
            ("compressed", layer.latent, layer.cache),
        ):
            found = self._run("rope_quant_insert", {"latent": latent[rows], "kv_cache": cache, **shared})
            cache.copy_(found.arguments["kv_cache"])
            yield self._step(kind, found)
        norm = {"norm_weight": layer.key_norm, "eps": layer.config.rms_norm_eps}
        arguments = {"k_pre": layer.keys[rows], "kv_cache": layer.index_cache, **norm, **shared}
        found = self._run("indexer_k_norm_rope_store", arguments)
        layer.index_cache.copy_(found.arguments["kv_cache"])
        yield self._step("keys", found)

    def _choose(self) -> Iterator[Step]:
        """Index queries, scores, candidate blocks and the choice of rows."""
        layer, config = self.layer, self.layer.config
        scales = {"softmax_scale": config.index_head_dim**-0.5, "head_scale": config.index_n_heads**-0.5}
        rotary = {"positions": self.positions, "cos_sin_cache": layer.rope}
        arguments = {"q": layer.index_q[self.rows], "weights": layer.index_weights[self.rows], **rotary, **scales}
        found = self._run("indexer_q_rope_quant", arguments)
        codes, folded = found.values
        yield self._step(f"H{config.index_n_heads}", found)

        queries = {"q_codes": codes, "weights": folded}
        table = layer.block_table(BLOCK).expand(self.count, -1)
        paged = {"kv_cache": layer.index_cache, "context_lens": self.lens, "block_table": table}
        found = self._run("indexer_logits_paged", {**queries, **paged, "max_context_len": self.last})
        logits = found.values[0]
        yield self._step(f"ctx{self.last}", found)
        if self.phase == PREFILL:
            keys = {**layer.index_keys(self.count), "row_start": torch.zeros_like(self.lens), "row_end": self.lens}
            found = self._run("indexer_logits_prefill", {**queries, **keys, "max_k": self.count})
            yield self._step(f"ctx{self.last}", found)

        size = config.candidate_block_size
        blocks = {"logits": logits, "row_lens": self.lens, "topk_blocks": TOPK_BLOCKS, "block_size": size}
        found = self._run("select_candidate_blocks", blocks)
        yield self._step(f"B{TOPK_BLOCKS}x{size}", found)
        candidates = {"candidate_blocks": found.values[0], "candidate_block_size": size}
        picked = {"logits": logits, "row_lens": self.lens, "topk": TOPK}
        yield self._step(f"K{TOPK}-candidates", self._run("indexer_topk", {**picked, **candidates}))
        found = self._run("indexer_topk", picked)
        self.chosen = found.values[0]
        yield self._step(f"K{TOPK}", found)

    def _attend_prompt(self) -> Iterator[Step]:
        """Both caches into one workspace, the index list over it, and attention."""
        layer, tokens, window = self.layer, self.count, self.layer.config.sliding_window
        workspace = torch.zeros(1, 2 * tokens, layer.config.head_dim, dtype=torch.bfloat16, device=layer.device)
        lens = layer.int32(tokens)
        for kind, cache, block, offset in (
            ("compressed", layer.cache, BLOCK, 0),
            ("swa", layer.swa_cache, SWA_BLOCK, tokens),
        ):
            arguments = {"out": workspace, "k_cache": cache, "seq_lens": lens, "gather_lens": None}
            place = {"block_table": layer.block_table(block), "block_size": block, "offset": offset}
            found = self._run("dequantize_and_gather_k_cache", {**arguments, **place})
            workspace.copy_(found.arguments["out"])
            yield self._step(kind, found)
        request = {"query_start_loc": layer.int32(0, tokens), "seq_lens": lens, "gather_lens": lens}
        shape = {"window_size": window, "compress_ratio": 1, "topk": TOPK, "M": 2 * tokens, "N": tokens}
        found = self._run("combine_topk_swa_indices", {"topk_indices": self.chosen, **request, **shape})
        indices, index_lens = found.values
        yield self._step(f"K{TOPK}-W{window}", found)
        rows = {"kv": workspace.flatten(0, 1), "indices": indices, "lens": index_lens}
        head = {"q": layer.q[self.rows], "attn_sink": layer.attn_sink, "softmax_scale": layer.scale}
        found = self._run("sparse_mla_prefill", {**rows, **head})
        self.attended = found.values[0]
        yield self._step(f"H{layer.q.shape[1]}-K{indices.shape[1]}", found)

    def _attend_token(self) -> Iterator[Step]:
        """Attention straight from the paged caches."""
        layer, window = self.layer, self.layer.config.sliding_window
        request = {
            "token_to_req_indices": torch.zeros_like(self.lens),
            "block_table": layer.block_table(BLOCK),
            "is_valid_token": torch.ones_like(self.lens, dtype=torch.bool),
        }
        found = self._run("global_topk_indices", {"topk_indices": self.chosen, "block_size": BLOCK, **request})
        extra, extra_lens = found.values
        yield self._step(f"K{TOPK}", found)
        seen = self.positions[:, None] - torch.arange(window, device=layer.device)
        swa = {"swa_k_cache": layer.swa_cache, "swa_indices": seen.clamp_min(-1).int()}
        swa["swa_lens"] = self.lens.clamp_max(window)
        compressed = {"extra_k_cache": layer.cache, "extra_indices": extra, "extra_lens": extra_lens}
        head = {"attn_sink": layer.attn_sink, "softmax_scale": layer.scale}
        found = self._run("sparse_mla_decode", {"q": layer.q[self.rows], **swa, **head, **compressed})
        self.attended = found.values[0]
        yield self._step(f"H{layer.q.shape[1]}-K{TOPK + window}", found)

    def _project(self) -> Iterator[Step]:
        layer, groups = self.layer, self.layer.config.o_groups
        place = {"positions": self.positions, "cos_sin_cache": layer.rope, "num_groups": groups}
        found = self._run("inverse_rope_grouped", {"o": self.attended, **place})
        yield self._step(f"G{groups}", found)
        found = self._run("grouped_output_projection", {"x": found.values[0], "weight": layer.wo_a})
        yield self._step(f"G{groups}-R{layer.wo_a.shape[1]}", found)

    def _route(self) -> Iterator[Step]:
        """Routes grouped by expert, each expert's from last to first: the operator puts them into order."""
        layer, topk = self.layer, self.layer.config.num_experts_per_tok
        chosen = layer.route_scores[self.rows].topk(topk).indices.flatten().tolist()
        ids: list[int] = []
        experts: list[int] = []
        for expert in range(layer.config.n_routed_experts):
            routes = [i for i in reversed(range(len(chosen))) if chosen[i] == expert]
            routes += [len(chosen)] * (-len(routes) % ROUTE_BLOCK)
            ids, experts = ids + routes, experts + [expert] * (len(routes) // ROUTE_BLOCK)
        arguments = {
            "sorted_token_ids": layer.int32(*ids),
            "expert_ids": layer.int32(*experts),
            "num_tokens_post_padded": layer.int32(len(ids)),
            "block_size": ROUTE_BLOCK,
            "num_routes": len(chosen),
        }
        name = f"K{topk}-E{layer.config.n_routed_experts}-block{ROUTE_BLOCK}"
        yield self._step(name, self._run("stable_expert_order", arguments))

"""DeepSeek-V4.1's attention layer for compute capability 8.x: vLLM's layer, metadata and cache, our operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v41.attention import DeepseekV4Attention
from vllm.models.deepseek_v41.sparse_mla import (
    DeepseekV4FlashMLAMetadataBuilder,
    DeepseekV4SparseMLABackend,
    DeepseekV41SparseSWAMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend
from vllm.v1.worker.workspace import current_workspace_manager

from deepinfer_sm80 import ops
from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.vllm_plugin.indexer import AmpereIndexer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_INDEX_ALIGNMENT = 128  # combine_topk_swa_indices pads its rows to this


class AmpereSparseMLABackend(DeepseekV4SparseMLABackend):
    """Compressed-cache metadata: vLLM's own. CUDA graphs hold decode batches only: prefill is driven by the host."""

    @staticmethod
    def get_name() -> str:
        return "DEEPINFER_SPARSE_MLA"

    @staticmethod
    def get_builder_cls() -> type[DeepseekV4FlashMLAMetadataBuilder]:
        return DeepseekV4FlashMLAMetadataBuilder

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


class AmpereSWAMetadataBuilder(DeepseekV41SparseSWAMetadataBuilder):
    """Sliding-window metadata without FlashMLA's tile-scheduler plans, which only its kernels read.

    Claims what vLLM's own builder for FlashMLA claims; a graph of mixed batches (``cudagraph_mode=FULL``), which this
    would allow, is refused by ``requirements``.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def build_tile_scheduler(self, num_decode_tokens: int) -> dict[str, Any]:
        # Without decode tokens vLLM's method returns the plan holders empty, on every GPU.
        del num_decode_tokens
        holders: dict[str, Any] = super().build_tile_scheduler(0)
        return holders


class AmpereSWABackend(DeepseekSparseSWABackend):
    @staticmethod
    def get_builder_cls() -> type[AmpereSWAMetadataBuilder]:
        return AmpereSWAMetadataBuilder


class AmpereAttention(DeepseekV4Attention):
    """Sparse MLA over the 584-byte records for compute capability 8.x.

    Decode reads the paged caches in place; prefill gathers each request's compressed rows and window into a bf16
    workspace. Queries need no head padding.
    """

    backend_cls = AmpereSparseMLABackend
    swa_backend_cls = AmpereSWABackend

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _indexer_cls(self, k_cache: Any) -> type[AmpereIndexer]:
        return AmpereIndexer

    def forward_mqa(self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor) -> None:
        """Attention of ``q`` [T, heads, 512] bf16 into ``output`` of that shape; this step's keys are in the cache."""
        del kv, positions
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            # Profiling run: hold what a prefill chunk will need, so that the KV cache is sized around it.
            self._prefill_workspace(self.PREFILL_CHUNK_SIZE, self._max_gathered_rows(), self._topk_width())
            output.zero_()
            return
        swa = metadata[self.swa_cache_layer.prefix]
        compressed = None if self.compressed_cache_prefix is None else metadata[self.compressed_cache_prefix]
        decode_tokens = swa.num_decode_tokens
        if swa.num_prefill_tokens > 0:
            self._prefill(q[decode_tokens:], output[decode_tokens:], swa, compressed)
        if decode_tokens > 0:
            self._decode(q[:decode_tokens], output[:decode_tokens], swa, compressed)

    def _decode(self, q: torch.Tensor, output: torch.Tensor, swa: Any, compressed: Any) -> None:
        tokens = q.shape[0]
        cache = indices = lens = None
        if compressed is not None:
            cache = self._compressed_kv_cache()
            indices, lens = ops.global_topk_indices(
                self.topk_indices_buffer[:tokens],
                swa.token_to_req_indices,
                compressed.block_table[: swa.num_decodes],
                compressed.block_size // self.compress_ratio,
                swa.is_valid_token[:tokens],
            )
        ops.sparse_mla_decode(
            q,
            self.swa_cache_layer.kv_cache,
            swa.decode_swa_indices.view(tokens, -1),
            swa.decode_swa_lens,
            self.attn_sink,
            self.scale,
            extra_k_cache=cache,
            extra_indices=indices,
            extra_lens=lens,
            out=output,
        )

    def _prefill(self, q: torch.Tensor, output: torch.Tensor, swa: Any, compressed: Any) -> None:
        first, tokens = swa.num_decodes, swa.num_prefill_tokens
        starts = swa.query_start_loc_cpu[first:].tolist()  # a host tensor: no synchronisation
        topk_indices = self.topk_indices_buffer[swa.num_decode_tokens :][:tokens]
        topk = 0 if compressed is None else topk_indices.shape[-1]
        plan = swa.get_prefill_chunk_plan(
            compress_ratio=self.compress_ratio,
            prefill_chunk_size=self.PREFILL_CHUNK_SIZE,
            has_compressed=compressed is not None,
        )
        for begin, end, n, m in plan:
            rows = slice(starts[begin] - starts[0], starts[end] - starts[0])
            seq_lens, gather_lens = swa.prefill_seq_lens[begin:end], swa.prefill_gather_lens[begin:end]
            kv, indices, lens = self._prefill_workspace(end - begin, m, topk)
            if compressed is not None:
                ops.dequantize_and_gather_k_cache(
                    kv,
                    self._compressed_kv_cache(),
                    seq_lens // self.compress_ratio,
                    None,
                    compressed.block_table[first + begin : first + end],
                    compressed.block_size // self.compress_ratio,
                    0,
                )
            ops.dequantize_and_gather_k_cache(
                kv,
                self.swa_cache_layer.kv_cache,
                seq_lens,
                gather_lens,
                swa.block_table[first + begin : first + end],
                swa.block_size,
                n,
            )
            length = rows.stop - rows.start
            combined, combined_lens = ops.combine_topk_swa_indices(
                topk_indices[rows],
                swa.query_start_loc[first + begin : first + end + 1],
                seq_lens,
                gather_lens,
                self.window_size,
                self.compress_ratio,
                topk,
                m,
                n,
                out=(indices[:length], lens[:length]),
            )
            ops.sparse_mla_prefill(
                q[rows],
                kv.view(-1, kv.shape[-1]),
                combined,
                combined_lens,
                self.attn_sink,
                self.scale,
                out=output[rows],
            )

    def _o_proj(self, attn_out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, heads, 512] bf16 -> inverse RoPE -> grouped ``wo_a`` -> ``wo_b``: [T, hidden] bf16."""
        weight = self.wo_a.weight
        if weight.dtype != torch.bfloat16:
            raise UnsupportedOptionError(
                option="VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD",
                found=f"0 (wo_a is {weight.dtype})",
                allowed="1 (wo_a held as bf16)",
                remedy="Unset the variable.",
            )
        grouped = ops.inverse_rope_grouped(attn_out, positions, self.rotary_emb.cos_sin_cache, self.n_local_groups)
        z = ops.grouped_output_projection(grouped, weight.view(self.n_local_groups, self.o_lora_rank, -1))
        projected: torch.Tensor = self._wo_b_proj(z.flatten(1))
        return projected

    def _topk_width(self) -> int:
        return 0 if self.compress_ratio == 0 else int(self.topk_indices_buffer.shape[-1])

    def _max_gathered_rows(self) -> int:
        compressed = 0 if self.compress_ratio == 0 else -(-self.max_model_len // self.compress_ratio)
        return int(compressed + self.window_size + self.max_num_batched_tokens)

    def _prefill_workspace(
        self, requests: int, rows: int, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        width = -(-(topk + self.window_size) // _INDEX_ALIGNMENT) * _INDEX_ALIGNMENT
        kv, indices, lens = current_workspace_manager().get_simultaneous(
            ((requests, rows, self.head_dim), torch.bfloat16),
            ((self.max_num_batched_tokens, width), torch.int32),
            ((self.max_num_batched_tokens,), torch.int32),
        )
        return kv, indices, lens


def select_attention_class(vllm_config: VllmConfig) -> type[AmpereAttention]:
    """Replaces vLLM's choice for every DeepSeek-V4.1 layer, draft layers included."""
    del vllm_config  # what it asks for was checked when the model was built
    return AmpereAttention

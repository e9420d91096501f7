"""The lightning indexer for compute capability 8.x: vLLM's layer and metadata, our quantisation, logits and top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as vllm_envs
from vllm import _custom_ops
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.models.deepseek_v41.attention import DeepseekV4Indexer
from vllm.v1.worker.workspace import current_workspace_manager

from deepinfer_sm80 import ops

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SCALE_BYTES = 4


def always_flatten(vllm_config: VllmConfig) -> bool:
    """Replaces vLLM's test whether decode rows are expanded to one token each: our paged logits take them so."""
    del vllm_config
    return True


def no_deep_gemm() -> bool:
    """Replaces vLLM's test whether the DeepGEMM package is there: it has no kernel for 8.x."""
    return False


class AmpereSparseAttnIndexer(SparseAttnIndexer):
    """Scores cached index keys and publishes each row's top-k into the model-wide buffer."""

    def __init__(
        self,
        k_cache: Any,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: torch.Tensor,
        skip_k_cache_insert: bool = False,
        use_fp4_cache: bool = False,
        compress_ratio: int = 1,
        candidate_blocks: torch.Tensor | None = None,
        candidate_block_size: int = 0,
        candidate_write: bool = False,
    ) -> None:
        # Not SparseAttnIndexer.__init__: it demands DeepGEMM and registers a warm-up that compiles an FP8-typed kernel.
        CustomOp.__init__(self)
        del quant_block_size, scale_fmt, skip_k_cache_insert, use_fp4_cache
        self.k_cache = k_cache
        self.topk_tokens = topk_tokens
        self.head_dim = head_dim
        self.max_model_len = max_model_len  # in compressed rows
        self.max_total_seq_len = max_total_seq_len
        self.topk_indices_buffer = topk_indices_buffer
        self.compress_ratio = compress_ratio
        self.candidate_blocks = candidate_blocks
        self.candidate_block_size = candidate_block_size
        self.candidate_write = candidate_write

    def forward_cuda(
        self, hidden_states: torch.Tensor, q_quant: torch.Tensor, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """``q_quant`` [T, 32, 128] uint8, ``weights`` [T, 32] fp32 with the query scale folded in; keys are cached."""
        del k
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict):
            self._reserve(hidden_states.device)
            return self.topk_indices_buffer
        metadata = attn_metadata[self.k_cache.prefix]
        self.topk_indices_buffer[: hidden_states.shape[0]] = -1
        if metadata.num_prefills > 0:
            for chunk in metadata.prefill.chunks:
                self._prefill(chunk, q_quant, weights)
        if metadata.num_decodes > 0:
            self._decode(metadata, q_quant, weights)
        return self.topk_indices_buffer

    forward_native = forward_cuda

    def _prefill(self, chunk: Any, q_quant: torch.Tensor, weights: torch.Tensor) -> None:
        keys, scales = self._key_workspace(self.max_total_seq_len)
        keys, scales = keys[: chunk.max_local_total_seq_lens], scales[: chunk.max_local_total_seq_lens]
        if not chunk.skip_kv_gather and chunk.local_total_seq_lens > 0:
            _custom_ops.cp_gather_indexer_k_quant_cache(
                self.k_cache.kv_cache, keys, scales, chunk.block_table, chunk.local_cu_seq_lens
            )
        rows = slice(chunk.token_start, chunk.token_end)
        logits = ops.indexer_logits_prefill(
            q_quant[rows],
            weights[rows],
            keys,
            scales.view(torch.float32).squeeze(-1),
            chunk.cu_seqlen_ks,
            chunk.cu_seqlen_ke,
            chunk.max_seqlen_k,
        )
        self._select(logits, chunk.cu_seqlen_ke - chunk.cu_seqlen_ks, rows)

    def _decode(self, metadata: Any, q_quant: torch.Tensor, weights: torch.Tensor) -> None:
        rows = slice(0, metadata.num_decode_tokens)
        width = self.max_model_len
        if not torch.cuda.is_current_stream_capturing():
            width = max(1, min(width, metadata.max_seq_len // self.compress_ratio))
        context_lens = metadata.decode.seq_lens.reshape(-1)[rows]
        logits = ops.indexer_logits_paged(
            q_quant[rows],
            weights[rows],
            self.k_cache.kv_cache,
            context_lens,
            metadata.decode.block_table[rows],
            width,
        )
        self._select(logits, context_lens, rows)

    def _select(self, logits: torch.Tensor, row_lens: torch.Tensor, rows: slice) -> None:
        candidates = None if self.candidate_blocks is None else self.candidate_blocks[rows]
        if candidates is not None and self.candidate_write:
            ops.select_candidate_blocks(
                logits, row_lens, candidates.shape[1], self.candidate_block_size, out=candidates
            )
            candidates = None  # the source's own top-k is not restricted
        ops.indexer_topk(
            logits,
            row_lens,
            self.topk_tokens,
            candidate_blocks=candidates,
            candidate_block_size=self.candidate_block_size,
            out=self.topk_indices_buffer[rows, : self.topk_tokens],
        )

    def _key_workspace(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, scales = current_workspace_manager().get_simultaneous(
            ((rows, self.head_dim), torch.uint8), ((rows, _SCALE_BYTES), torch.uint8)
        )
        return keys, scales

    def _reserve(self, device: torch.device) -> None:
        """Hold in the profiling run what scoring will need, so that the KV cache is sized around it."""
        self._key_workspace(self.max_total_seq_len)
        # logits, and as much again for the selection's scratch
        torch.empty(2 * vllm_envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20, dtype=torch.uint8, device=device)


class AmpereIndexer(DeepseekV4Indexer):
    """vLLM's indexer with our query quantisation and key store."""

    attn_cls = AmpereSparseAttnIndexer

    def _produce_k(self, latent: torch.Tensor | None, positions: torch.Tensor, rotary_emb: Any) -> None:
        attn_metadata = get_forward_context().attn_metadata
        if not isinstance(attn_metadata, dict) or latent is None:
            return  # profiling run: no cache is bound yet
        keys, _ = self.wk(latent)
        ops.indexer_k_norm_rope_store(
            keys,
            positions,
            rotary_emb.cos_sin_cache,
            self.k_norm.weight,
            self.k_norm.variance_epsilon,
            self.k_cache.kv_cache,
            attn_metadata[self.k_cache.prefix].slot_mapping,
            self.compress_ratio,
        )

    def forward_q(
        self,
        qr: Any,
        qr_scale: torch.Tensor | None,
        indexer_weights: torch.Tensor,
        positions: torch.Tensor,
        rotary_emb: Any,
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        q = self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim)
        codes, weights = ops.indexer_q_rope_quant(
            positions, q, rotary_emb.cos_sin_cache, indexer_weights, self.softmax_scale, self.n_head**-0.5
        )
        return codes, None, weights

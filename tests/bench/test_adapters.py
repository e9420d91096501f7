"""Adapters that change shapes, views or results: a stand-in with vLLM's parameters gets what our contract means."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import adapters, cases, gate

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).parents[1] / "vllm_plugin/vllm_source.py")
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

DEEP_GEMM = "vllm.utils.deep_gemm"
ATTENTION = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"


@pytest.fixture
def install(monkeypatch):
    def installed(name, **members):
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            if ".".join(parts[:i]) not in sys.modules:
                monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
        for member, value in members.items():
            monkeypatch.setattr(sys.modules[name], member, value, raising=False)

    return installed


def fault(case, table):
    """What the gate says of the adapter's finished result."""
    kwargs = case.arguments("cpu", 0)
    result = table[case.op]()(kwargs)()
    finish = adapters.FINISH.get(case.op, lambda kwargs, result: result)
    return gate.disagreement(case.op, gate.expected(case.op, case.arguments("cpu", 0)), kwargs, finish(kwargs, result))


def test_key_store_and_query_staging(install):
    def store(*given):
        assert given[-1] is False, "FP8, not FP4"
        ops.pytorch("indexer_k_norm_rope_store")(*given[:-1])

    def stage(*given):
        codes, weights = ops.pytorch("indexer_q_rope_quant")(*given)
        return codes.view(torch.float8_e4m3fn), weights

    keys, queries = f"{adapters._V41}.indexer_k_store", "vllm.models.deepseek_v4.common.ops.fused_indexer_q"
    install(keys, indexer_k_norm_rope_store=store)
    install(queries, fused_indexer_q_rope_quant=stage)
    assert fault(cases.index_keys(3, 1), adapters.VLLM) == ""
    assert fault(cases.index_queries(3), adapters.VLLM) == ""
    assert source.parameters(keys, "indexer_k_norm_rope_store")[-2:] == ("compress_ratio", "use_fp4_cache")
    assert source.parameters(queries, "fused_indexer_q_rope_quant")[6] == "use_fp4"


def test_engram_launch(install, monkeypatch):
    """The launch names every parameter that vLLM's kernel has."""
    module = "vllm.models.deepseek_v41.common.engram"
    monkeypatch.setattr(cases, "ENGRAM_ROWS", 64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=7))
    parameters = source.parameters(module, "_engram_lookup_kernel")

    def launch(*given, **named):
        bound = dict(zip(parameters, given, strict=False)) | named
        assert set(bound) == set(parameters)
        assert bound["GRID"] == 5, "72 rows in tiles of 16"
        shape = (bound["weight"].view(torch.uint8), bound["scales"], bound["ids"])
        heads = (bound["HEAD_START"], bound["LOCAL_HEADS"], bound["vocab_start"], bound["vocab_end"])
        bound["out"].copy_(ops.pytorch("engram_lookup")(*shape, *heads))

    install(module, _engram_lookup_kernel={(5,): launch})
    assert fault(cases.engram(3), adapters.VLLM) == ""


def shuffled(result):
    """The same set in another order, -1 among it."""
    return result.flip(-1)


def test_candidate_blocks(install, monkeypatch):
    module = "vllm.model_executor.kernels.attention.dsa.candidate_blocks"
    monkeypatch.setattr(cases, "CANDIDATES", 16)

    def select(logits, row_ks, row_ke, topk_blocks, block_size, out):
        assert row_ks is None
        out.copy_(shuffled(ops.pytorch("select_candidate_blocks")(logits, row_ke, topk_blocks, block_size)))

    install(module, select_candidate_blocks=select)
    assert fault(cases.candidates(3, 100), adapters.VLLM) == "", "13 blocks of 16: three are -1"
    names = ("logits", "row_ks", "row_ke", "topk_blocks", "block_size", "out")
    assert source.parameters(module, "select_candidate_blocks")[:6] == names


@pytest.mark.parametrize(("rows", "native"), [(3, False), (3, True), (70, False)])
def test_topk(rows, native, install, monkeypatch):
    used = []

    def decode(name):
        def run(logits, lens, out, workspace, topk, width):
            used.append(name)
            assert workspace.numel() == 1 << 20
            assert width == logits.shape[1]
            out.copy_(shuffled(ops.pytorch("indexer_topk")(logits, lens, topk)))

        return run

    def prefill(logits, starts, ends, out, count, stride0, stride1, topk):
        used.append("per row")
        assert (starts.tolist(), count, stride0, stride1) == ([0] * rows, rows, logits.stride(0), 1)
        out.copy_(shuffled(ops.pytorch("indexer_topk")(logits, ends, topk)))

    install("vllm._custom_ops", top_k_per_row_prefill=prefill)
    limits = {"RADIX_TOPK_WORKSPACE_SIZE": 1 << 20, "AUTO_COOPERATIVE_MAX_ROWS": 64}
    install("vllm.model_executor.layers.indexer_topk", **limits)
    kernels = SimpleNamespace(cooperative_topk=decode("cooperative"), persistent_topk=decode("persistent"))
    monkeypatch.setattr(torch.ops, "_C", kernels, raising=False)
    assert fault(cases.select(rows, 600), adapters.VLLM_NATIVE if native else adapters.VLLM) == ""
    assert set(used) == {"per row" if rows > 64 else "cooperative" if native else "persistent"}


def open_ended(result):
    """What lies behind a length is whatever was there."""
    return result.masked_fill(result == float("-inf"), 7.0)


def test_deep_gemm_scores(install, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=7))

    def score(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
        given = (q[0].view(torch.uint8), weights, kv[0].view(torch.uint8), kv[1], cu_seqlen_ks, cu_seqlen_ke)
        assert q[1] is None
        return open_ended(ops.pytorch("indexer_logits_prefill")(*given, max_seqlen_k))

    def plan(context_lens, block_size, num_sms):
        assert context_lens.shape == (2, 1)
        return block_size, num_sms

    def paged(q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len):
        assert q[0].shape == (2, 1, 32, 128)
        assert schedule_metadata == (64, 7)
        given = (q[0].view(torch.uint8)[:, 0], weights, kv_cache[:, :, 0], context_lens[:, 0], block_tables)
        return open_ended(ops.pytorch("indexer_logits_paged")(*given, max_model_len))

    members = {"fp8_fp4_mqa_logits": score, "fp8_fp4_paged_mqa_logits": paged, "get_paged_mqa_logits_metadata": plan}
    install(DEEP_GEMM, **members)
    assert fault(cases.prompt_logits(5, 70), adapters.VLLM_NATIVE) == ""
    assert fault(cases.paged_logits(2, 128), adapters.VLLM_NATIVE) == ""
    assert source.parameters(DEEP_GEMM, "get_paged_mqa_logits_metadata")[:3] == (
        "context_lens",
        "block_size",
        "num_sms",
    )
    assert source.parameters(DEEP_GEMM, "fp8_fp4_mqa_logits")[2:] == score.__code__.co_varnames[2:6]
    assert source.parameters(DEEP_GEMM, "fp8_fp4_paged_mqa_logits")[:7] == paged.__code__.co_varnames[:7]


def ragged(indices, lengths, num_rows):
    """Dense lists stand in for ragged ones; the rows of the cache beside them."""
    return indices, (lengths, num_rows)


@pytest.mark.parametrize("case", [cases.decode(2, 128), cases.decode(2, 0)], ids=lambda case: case.name)
def test_triton_decode(case, install):
    names = source.parameters(ATTENTION, "_rocm_sparse_attn_decode_ragged_triton")

    def attend(*given):
        bound = dict(zip(names, given, strict=False))
        main, extra = bound["main_indptr"], bound.get("extra_indptr")
        assert main[1] == bound["main_cache"].shape[0] * bound["main_cache"].shape[1]
        assert (bound["nope_head_dim"], bound["rope_head_dim"]) == (448, 64)
        more = (bound["extra_cache"], bound["extra_indices"], extra[0]) if extra else ()
        swa = (bound["main_cache"], bound["main_indices"], main[0])
        return ops.pytorch("sparse_mla_decode")(bound["q"], *swa, bound["attn_sink"], bound["scale"], *more)

    install(ATTENTION, build_ragged_indices_from_dense=ragged, _rocm_sparse_attn_decode_ragged_triton=attend)
    assert fault(case, adapters.VLLM) == ""
    assert source.parameters(ATTENTION, "build_ragged_indices_from_dense") == ("indices", "lengths", "num_rows")


def test_triton_prefill(install):
    names = source.parameters(ATTENTION, "_rocm_sparse_attn_prefill_ragged_triton")

    def attend(*given):
        bound = dict(zip(names, given, strict=False))
        lens, rows = bound["indptr"]
        assert rows == bound["kv"].shape[0]
        lists = (bound["kv"], bound["indices"], lens)
        return ops.pytorch("sparse_mla_prefill")(bound["q"], *lists, bound["attn_sink"], bound["scale"])

    install(ATTENTION, build_ragged_indices_from_dense=ragged, _rocm_sparse_attn_prefill_ragged_triton=attend)
    assert fault(cases.prefill(2, 128), adapters.VLLM) == ""


def test_output_projection(install):
    module = "vllm.models.deepseek_v4.common.ops.fused_inv_rope_fp8_quant"

    def rotate(o, positions, cos_sin_cache, n_groups, heads_per_group, nope_dim, rope_dim, quantize):
        assert (heads_per_group * n_groups, nope_dim, rope_dim, quantize) == (o.shape[1], 448, 64, False)
        return ops.pytorch("inverse_rope_grouped")(o, positions, cos_sin_cache, n_groups), None

    install(module, fused_inv_rope_fp8_quant=rotate)
    install("vllm.models.deepseek_v4.nvidia.ops.o_proj")
    assert fault(cases.inverse_rope(2), adapters.VLLM) == ""
    assert fault(cases.projection(2), adapters.VLLM) == ""
    found = source.parameters(module, "fused_inv_rope_fp8_quant")
    assert found[:7] == rotate.__code__.co_varnames[:7]
    assert "quantize" in found


def test_finish_does_not_hide_a_wrong_choice():
    kwargs = {"logits": torch.zeros(1, 4)}
    right, wrong = torch.tensor([[3, 1, -1]]), torch.tensor([[3, 2, -1]])
    assert adapters.FINISH["indexer_topk"](kwargs, right.int()).tolist() == [[1, 3, -1]]
    assert adapters.FINISH["indexer_topk"](kwargs, wrong.int()).tolist() == [[2, 3, -1]]

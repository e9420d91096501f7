"""The adapters of the baselines hand over the right tensors, and vLLM has the functions that they name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from deepinfer_sm80 import ops
from deepinfer_sm80.bench import cases, flashmla, gate, providers

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).parents[1] / "vllm_plugin/vllm_source.py")
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

V41 = "vllm.models.deepseek_v41.common.ops"
CACHE = f"{V41}.cache_utils"
FUNCTIONS = {
    "combine_topk_swa_indices": (CACHE, "combine_topk_swa_indices", cases.combine(3, 300)),
    "global_topk_indices": (CACHE, "compute_global_topk_indices_and_lens", cases.mapping(2)),
    "dequantize_and_gather_k_cache": (CACHE, "dequantize_and_gather_k_cache", cases.gather(1, 128)),
    "rope_quant_insert": (f"{V41}.fused_compress_quant_cache", "rope_quant_insert", cases.insert(3)),
    "mhc_post": ("vllm.model_executor.kernels.mhc.tilelang", "mhc_post_tilelang", cases.mhc(2)),
}
FLASHMLA = "vllm.v1.attention.ops.flashmla"


@pytest.fixture(autouse=True)
def nothing_remembered():
    flashmla.functions.cache_clear()
    yield
    flashmla.functions.cache_clear()


def install(monkeypatch, name, **members):
    """A module of this name and its packages."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    vars(sys.modules[name]).update(members)


def arm_named(op, provider):
    found, left = providers.arms(op, "native", native_is_ampere=False)
    matching = [arm for arm in found if arm.provider == provider]
    assert matching, left
    return matching[0]


@pytest.mark.parametrize("op", FUNCTIONS)
def test_vllm_takes_our_arguments_in_our_order(op, monkeypatch):
    module, name, case = FUNCTIONS[op]
    install(monkeypatch, module, **{name: ops.pytorch(op)})
    kwargs = case.arguments("cpu", 0)
    result = arm_named(op, "vllm-native").prepare(kwargs)()
    assert gate.disagreement(op, gate.expected(op, case.arguments("cpu", 0)), kwargs, result) == ""


@pytest.mark.parametrize("op", FUNCTIONS)
def test_vllm_has_the_function_with_as_many_parameters(op):
    module, name, case = FUNCTIONS[op]
    found = source.parameters(module, name)
    ours = tuple(case.arguments("cpu", 0))
    assert len(found) >= len(ours)
    renamed = {"mhc_post": ("x", "residual", "post_layer_mix", "comb_res_mix")}.get(op)
    assert found[: len(ours)] == (renamed or ours)


MHC = "vllm.model_executor.kernels.mhc"


def fused_by_vllm(
    x, residual, post, comb, fn, scale, base, rms_eps, pre_eps, eps, factor, iters, pre_mix, norm, norm_eps
):
    """As vLLM's: an axis of one behind post, and an auxiliary mean behind the results."""
    assert (pre_eps, factor, post.shape[-1]) == (eps, 2.0, 1)
    mixes = (x, residual, post.squeeze(-1), comb, fn, scale, base, pre_mix, norm)
    streams, post, *others = ops.pytorch("mhc_fused_post_pre_delayed")(*mixes, rms_eps, eps, norm_eps, iters)
    return (streams, post.unsqueeze(-1), *others, x.new_empty(0))


@pytest.mark.parametrize("provider", ["vllm-native", "geometry-2-8-128"])
def test_vllm_s_fused_mix_gets_our_arguments_and_one_arm_another_geometry(provider, monkeypatch):
    seen = []
    kernels = {"mhc_fused_post_pre_split_config": lambda tokens, hidden, streams: (6, 8, 128)}

    def fused(*given):
        seen.append(sys.modules[f"{MHC}.tilelang_kernels"].mhc_fused_post_pre_split_config(3, 5120, 4))
        return fused_by_vllm(*given)

    install(monkeypatch, f"{MHC}.tilelang", mhc_fused_post_pre_delayed_tilelang=fused)
    monkeypatch.setitem(sys.modules, f"{MHC}.tilelang_kernels", SimpleNamespace(**kernels))
    op, case = "mhc_fused_post_pre_delayed", cases.mhc_fused(3)
    kwargs, arm = case.arguments("cpu", 0), arm_named("mhc_fused_post_pre_delayed", provider)
    result = arm.finish(kwargs, arm.prepare(kwargs)())
    assert gate.disagreement(op, gate.expected(op, case.arguments("cpu", 0)), kwargs, result) == ""
    assert seen == [(2, 8, 128) if provider == "geometry-2-8-128" else (6, 8, 128)]
    assert sys.modules[f"{MHC}.tilelang_kernels"].mhc_fused_post_pre_split_config(3, 5120, 4) == (6, 8, 128)
    if provider == "geometry-2-8-128":
        with pytest.raises(ValueError, match="vLLM fuses up to 32 tokens, here are 33"):
            arm.prepare(cases.mhc_fused(33).arguments("cpu", 0))


def test_vllm_has_the_fused_mix_and_its_choice_of_a_geometry():
    assert source.parameters(f"{MHC}.tilelang", "mhc_fused_post_pre_delayed_tilelang")[:15] == (
        *("x", "residual", "post_layer_mix", "comb_res_mix", "fn", "hc_scale", "hc_base", "rms_eps", "hc_pre_eps"),
        *("hc_sinkhorn_eps", "hc_post_mult_value", "sinkhorn_repeat", "pre_mix", "norm_weight", "norm_eps"),
    )
    chosen = source.parameters(f"{MHC}.tilelang_kernels", "mhc_fused_post_pre_split_config")
    assert chosen == ("num_tokens", "hidden_size", "hc_mult")


def flashmla_decode(**given):
    assert given["is_fp8_kvcache"] is True
    assert given["head_dim_v"] == 512
    assert given["block_table"] is None
    out = ops.pytorch("sparse_mla_decode")(
        given["q"].squeeze(1),
        given["k_cache"].squeeze(-2),
        given["indices"].squeeze(1),
        given["topk_length"],
        given["attn_sink"],
        given["softmax_scale"],
        *(
            (
                given["extra_k_cache"].squeeze(-2),
                given["extra_indices_in_kvcache"].squeeze(1),
                given["extra_topk_length"],
            )
            if "extra_k_cache" in given
            else ()
        ),
    )
    return out.unsqueeze(1), None


def flashmla_prefill(q, kv, indices, sm_scale, attn_sink, topk_length):
    out = ops.pytorch("sparse_mla_prefill")(q, kv.squeeze(1), indices.squeeze(1), topk_length, attn_sink, sm_scale)
    return out, None, None


@pytest.mark.parametrize(
    "case", [cases.decode(2, 128), cases.decode(2, 0), cases.prefill(2, 128)], ids=lambda c: c.name
)
def test_flashmla_gets_the_same_attention(case, monkeypatch):
    install(
        monkeypatch,
        FLASHMLA,
        _is_flashmla_available=lambda: (True, None),
        get_mla_metadata=lambda: (SimpleNamespace(), None),
        flash_mla_with_kvcache=flashmla_decode,
        flash_mla_sparse_fwd=flashmla_prefill,
    )
    kwargs = case.arguments("cpu", 0)
    result = arm_named(case.op, "flashmla").prepare(kwargs)()
    assert gate.disagreement(case.op, gate.expected(case.op, kwargs), kwargs, result) == ""


def test_flashmla_is_what_it_was_before_another_lowering_was_entered(monkeypatch):
    """The aid for another lowering puts refusals in the module's place."""
    functions = {name: lambda name=name: name for name in flashmla.FUNCTIONS}
    install(monkeypatch, FLASHMLA, _is_flashmla_available=lambda: (True, None), **functions)
    before = flashmla.functions()
    install(monkeypatch, FLASHMLA, _is_flashmla_available=lambda: (False, "refused"))
    assert flashmla.functions() is before
    assert before.flash_mla_sparse_fwd() == "flash_mla_sparse_fwd"


def test_flashmla_that_cannot_load_gives_its_reason(monkeypatch):
    install(monkeypatch, FLASHMLA, _is_flashmla_available=lambda: (False, "no extension for this GPU"))
    left = providers.arms("sparse_mla_decode", "native", native_is_ampere=False)[1]
    assert {"ImportError: no extension for this GPU"} == {item.reason for item in left if item.provider == "flashmla"}


def test_flashmla_has_the_parameters_that_are_given():
    interface = "vllm.third_party.flashmla.flash_mla_interface"
    decode = {"q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata"}
    decode |= {"softmax_scale", "is_fp8_kvcache", "indices", "topk_length", "attn_sink"}
    decode |= {"extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"}
    assert decode <= set(source.parameters(interface, "flash_mla_with_kvcache"))
    prefill = {"q", "kv", "indices", "sm_scale", "attn_sink", "topk_length"}
    assert prefill <= set(source.parameters(interface, "flash_mla_sparse_fwd"))
    assert source.definition(FLASHMLA, "_is_flashmla_available")

"""Each option the plugin cannot serve is refused by its flag's name, with what is allowed and what to do."""

import ast
import importlib.util
import sys
import types
from pathlib import Path

import pytest

from deepinfer_sm80.errors import ModelConfigError, UnsupportedOptionError
from deepinfer_sm80.vllm_plugin.requirements import REQUIREMENTS, check_config

_spec = importlib.util.spec_from_file_location("vllm_source", Path(__file__).with_name("vllm_source.py"))
source = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(source)

Space = types.SimpleNamespace


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """vLLM's environment module, with the variable it has by default."""
    vllm = types.ModuleType("vllm")
    vllm.envs = Space(VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD=True)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return vllm.envs


def good():
    return Space(
        parallel_config=Space(
            tensor_parallel_size=8,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
            enable_ep_weight_filter=False,
            expert_placement_strategy="linear",
        ),
        attention_config=Space(backend=None, indexer_sparse_logits=False),
        cache_config=Space(cache_dtype="auto"),
        use_v2_model_runner=True,
        quant_config=Space(weight_block_size=[32, 32]),
        model_config=Space(hf_config=Space(expert_dtype="fp4"), multimodal_config=None),
        kernel_config=Space(moe_backend="auto"),
        compilation_config=Space(cudagraph_mode=Space(name="FULL_AND_PIECEWISE")),
        engram_config=Space(cpu_offload=True),
        speculative_config=Space(method="dspark", draft_model_config=Space(hf_config=Space())),
    )


def test_the_default_configuration_is_served():
    check_config(good())
    check_config(good(), draft=True)


def filtered(config, placement="linear"):
    config.parallel_config.enable_expert_parallel = config.parallel_config.enable_ep_weight_filter = True
    config.parallel_config.expert_placement_strategy = placement


def over_peers(config, tp=1):
    config.engram_config.cpu_offload = False
    config.parallel_config.tensor_parallel_size, config.parallel_config.data_parallel_size = tp, 2


def filtered_round_robin(config):
    filtered(config, "round_robin")
    config.speculative_config = None


def kept_quantised(config):
    sys.modules["vllm"].envs.VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD = False


BAD = {
    "--tensor-parallel-size": lambda c: setattr(c.parallel_config, "tensor_parallel_size", 3),
    "--prefill-context-parallel-size": lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
    "--decode-context-parallel-size": lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
    "--attention-backend": lambda c: setattr(c.attention_config, "backend", Space(name="FLASHINFER_MLA_SPARSE_DSV41")),
    "--kv-cache-dtype": lambda c: setattr(c.cache_config, "cache_dtype", "nvfp4_ds_mla"),
    "--attention-config indexer_sparse_logits": lambda c: setattr(c.attention_config, "indexer_sparse_logits", True),
    "VLLM_USE_V2_MODEL_RUNNER": lambda c: setattr(c, "use_v2_model_runner", False),
    "config.json quantization_config.weight_block_size": lambda c: setattr(
        c.quant_config, "weight_block_size", [128, 128]
    ),
    "config.json quantization_config.expert_dtype": lambda c: setattr(c.model_config.hf_config, "expert_dtype", "fp8"),
    "--moe-backend": lambda c: setattr(c.kernel_config, "moe_backend", "deep_gemm_mega_moe"),
    "--compilation-config cudagraph_mode": lambda c: setattr(
        c.compilation_config, "cudagraph_mode", Space(name="FULL")
    ),
    "--enable-ep-weight-filter": filtered,
    "--expert-placement-strategy": filtered_round_robin,
    "--engram-config cpu_offload": over_peers,
    "VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": kept_quantised,
    "--mm-encoder-only": lambda c: setattr(c.model_config, "multimodal_config", Space(mm_encoder_only=True)),
}


def test_every_requirement_has_a_bad_value_here():
    assert {r.option for r in REQUIREMENTS} == set(BAD)


@pytest.mark.parametrize("option", BAD)
def test_a_bad_value_is_refused_by_name(option):
    config = good()
    BAD[option](config)
    with pytest.raises(UnsupportedOptionError) as caught:
        check_config(config)
    message = str(caught.value)
    assert f"with {option}=" in message
    assert "allowed is" in message


def test_the_filter_is_served_with_a_draft_that_has_no_experts():
    config = good()
    filtered(config)
    config.speculative_config = Space(method="ngram")
    check_config(config)


def test_the_filter_without_speculation_and_the_table_with_tensor_parallelism_are_served():
    config = good()
    filtered(config)
    config.speculative_config = None
    check_config(config)
    config = good()
    over_peers(config, tp=2)
    check_config(config)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_of_decode_batches_are_served(mode):
    config = good()
    config.compilation_config.cudagraph_mode = Space(name=mode)
    check_config(config)


def test_the_draft_is_asked_too_but_not_for_what_it_has_not():
    config = good()
    config.attention_config.backend = Space(name="FLASHINFER_MLA_SPARSE_DSV41")
    with pytest.raises(UnsupportedOptionError, match="--attention-backend"):
        check_config(config, draft=True)
    config = good()
    over_peers(config)  # as vLLM derives it for a draft without tensor parallelism; it has no table
    check_config(config, draft=True)


def test_a_model_the_operators_are_not_built_for_is_refused_before_it_is_loaded():
    """Under ``--load-format dummy`` no weight would ever be looked at."""
    config = good()
    config.model_config.hf_config.index_n_heads = 16
    with pytest.raises(ModelConfigError, match="index_n_heads must be 32"):
        check_config(config)
    config = good()
    config.speculative_config.draft_model_config.hf_config.head_dim = 256
    check_config(config)
    with pytest.raises(ModelConfigError, match="head_dim must be 512"):
        check_config(config, draft=True)


def test_the_backends_and_graph_modes_are_vllms_own_names():
    kernel, compilation = (ast.unparse(source.module(f"vllm.config.{name}")) for name in ("kernel", "compilation"))
    for requirement in REQUIREMENTS:
        if requirement.option == "--moe-backend":
            assert all(f"'{name}'" in kernel for name in requirement.allowed)
        if requirement.option == "--compilation-config cudagraph_mode":
            assert all(f"\n    {name} = " in compilation for name in requirement.allowed)

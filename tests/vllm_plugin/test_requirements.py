"""Each option the plugin cannot serve is refused by its flag's name, with what is allowed and what to do."""

import types

import pytest

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.vllm_plugin.requirements import REQUIREMENTS, check_config

Space = types.SimpleNamespace


def good():
    return Space(
        parallel_config=Space(tensor_parallel_size=8, prefill_context_parallel_size=1, decode_context_parallel_size=1),
        attention_config=Space(backend=None, indexer_sparse_logits=False),
        cache_config=Space(cache_dtype="auto"),
        use_v2_model_runner=True,
        quant_config=Space(weight_block_size=[32, 32]),
        model_config=Space(hf_config=Space(expert_dtype="fp4")),
        kernel_config=Space(moe_backend="auto"),
    )


def test_the_default_configuration_is_served():
    check_config(good())


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
}


def test_every_requirement_has_a_bad_value_here():
    assert {r.option for r in REQUIREMENTS} <= set(BAD)


@pytest.mark.parametrize("option", BAD)
def test_a_bad_value_is_refused_by_name(option):
    config = good()
    BAD[option](config)
    with pytest.raises(UnsupportedOptionError) as caught:
        check_config(config)
    message = str(caught.value)
    assert f"with {option}=" in message
    assert "allowed is" in message

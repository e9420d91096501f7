"""The parts that DeepSeek-V4 and V4.1 share, against another project's V4 by other authors: nano-deepseek-v4, float32.

Shared: a whole attention layer without compressed rows (rotation there and back, sinks, window, grouped projection),
a whole mixture of experts (router, bias, clamp, shared expert), the pooling of neighbouring tokens. Not shared and not
compared: that project mixes streams as the paper does (sigmoid scores, coefficients used at once) where V4.1 takes a
softmax and a delayed pre-mix; it has no YaRN, no Engram, no candidates, no draft of this kind, and its index keys are
projections of their own.
"""

import dataclasses

import pytest
import torch
from nano_deepseek_v4.config import DeepSeekV4Config
from nano_deepseek_v4.modeling import DeepSeekV4Attention, DeepSeekV4MoE, HCACompressor

from deepinfer_sm80.model import attention, compressor, experts, linear, rope
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.state import Caches, State
from deepinfer_sm80.model.switches import Switches

H, TOKENS = 64, 300
HEADS, RANK = 16, 32


class Given:
    """A source of bfloat16 matrices and norms, and float32 vectors, under the released names."""

    def __init__(self, **tensors):
        self.tensors = tensors
        self.headers = {name: ("BF16", tuple(tensor.shape)) for name, tensor in tensors.items()}

    def load(self, name):
        return self.tensors[name]


def weights(prefix, tensors):
    return linear.Weights(Given(**{f"{prefix}.{name}": t for name, t in tensors.items()}), torch.device("cpu"))


def randn(*shape, seed=0, std=1.0):
    return (std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def ours(**changes):
    base = {"hidden_size": H, "num_attention_heads": HEADS, "q_lora_rank": RANK, "o_lora_rank": RANK}
    return dataclasses.replace(preset("tiny"), **base, rms_norm_eps=1e-6, **changes)


def theirs(**changes):
    base = {"hidden_size": H, "num_attention_heads": HEADS, "q_lora_rank": RANK, "o_lora_rank": RANK, "head_dim": 512}
    shared = {"o_groups": 8, "sliding_window": 128, "partial_rotary_factor": 64 / 512, "rms_norm_eps": 1e-6}
    return DeepSeekV4Config(**base, **shared, **changes)


def put(module, **values):
    """Sets parameters by their dotted names; every parameter of ``module`` must be named."""
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    parameters.pop("tid2eid", None)
    named = {name.replace("__", "."): value for name, value in values.items()}
    assert named.keys() == parameters.keys()
    for name, value in named.items():
        assert parameters[name].shape == value.shape, name
        parameters[name].data.copy_(value.float())


def rms_error(got, want):
    return ((got.float() - want.float()).square().mean() / want.float().square().mean()).sqrt().item()


@pytest.fixture
def exact_rows(monkeypatch):
    """Key rows as they are: that project keeps no FP8 records."""
    monkeypatch.setattr(attention, "as_recorded", lambda latent, turn, record: rope.rotate(latent, turn))


def begun(config, tokens):
    """A sequence whose first step of ``tokens`` tokens has begun."""
    state = State(Caches(config, False, torch.device("cpu")))
    state.begin(torch.zeros(tokens, dtype=torch.int64))
    return state


@torch.no_grad()
def test_attention_over_the_window_is_theirs(exact_rows):
    given = {
        "wq_a.weight": randn(RANK, H, seed=1, std=H**-0.5),
        "q_norm.weight": randn(RANK, seed=2, std=0.1) + 1,
        "wq_b.weight": randn(HEADS * 512, RANK, seed=3, std=2 * RANK**-0.5),
        "wkv.weight": randn(512, H, seed=4, std=H**-0.5),
        "kv_norm.weight": randn(512, seed=5, std=0.1) + 1,
        "attn_sink": randn(HEADS, seed=6).float() + 3,
        "wo_a.weight": randn(8 * RANK, HEADS * 512 // 8, seed=7, std=0.05),
        "wo_b.weight": randn(H, 8 * RANK, seed=8, std=RANK**-0.5),
    }
    config, x, positions = ours(), randn(TOKENS, H, seed=9), torch.arange(TOKENS)
    table = rope.table(config, False, TOKENS)
    layer = attention.Attention(config, weights("layers.0.attn", given), 0, table, Switches())
    module = DeepSeekV4Attention(theirs(), "sliding_attention")
    module.q_b_norm = torch.nn.Identity()  # V4.1 does not norm the heads of a query
    put(
        module,
        q_a_proj__weight=given["wq_a.weight"],
        q_a_norm__weight=given["q_norm.weight"],
        q_b_proj__weight=given["wq_b.weight"],
        kv_proj__weight=given["wkv.weight"],
        kv_norm__weight=given["kv_norm.weight"],
        attention_sink=given["attn_sink"],
        o_a_proj__weight=given["wo_a.weight"].view(8, RANK, -1),
        o_b_proj__weight=given["wo_b.weight"],
    )
    want = module(x.float()[None], positions[None])[0]
    step = attention.Step(begun(config, TOKENS), positions, 0)
    layer.write(x, step)
    got = layer(x, step)
    assert rms_error(got, want) < 2**-6


@torch.no_grad()
def test_mixture_of_experts_is_theirs():
    inner, total, chosen = 96, 8, 2
    shapes = {"w1": (inner, H), "w3": (inner, H), "w2": (H, inner)}
    names = [f"experts.{e}" for e in range(total)] + ["shared_experts"]
    given = {
        f"{name}.{part}.weight": randn(*shape, seed=100 * i + j, std=6 * shape[1] ** -0.5)
        for i, name in enumerate(names)
        for j, (part, shape) in enumerate(shapes.items())
    }
    given |= {"gate.weight": randn(total, H, seed=7, std=H**-0.5), "gate.bias": randn(total, seed=8, std=0.3).float()}
    x = randn(TOKENS, H, seed=9)
    layer = experts.Experts(ours(), weights("layers.0.ffn", given), "layers.0.ffn", total, chosen, Switches())
    module = DeepSeekV4MoE(
        theirs(n_routed_experts=total, num_experts_per_tok=chosen, moe_intermediate_size=inner), "moe"
    )
    values = {"gate__weight": given["gate.weight"], "e_score_correction_bias": given["gate.bias"]}
    for i, name in enumerate(names):
        place = f"experts__{i}" if i < total else "shared_experts__0"
        pair = [given[f"{name}.{part}.weight"] for part in ("w1", "w3")]
        values |= {
            f"{place}__gate_up_proj__weight": torch.cat(pair),
            f"{place}__down_proj__weight": given[f"{name}.w2.weight"],
        }
    put(module, **values)
    ids, share = layer.route(x)
    their_ids, their_share, _ = module.route(x.float()[None], None)
    assert torch.equal(ids, their_ids[0])
    assert torch.allclose(share, their_share[0], atol=1e-5)
    want = module(x.float()[None], None)[0][0]
    assert rms_error(layer(x), want) < 2**-7


@torch.no_grad()
def test_pooling_of_two_tokens_is_theirs():
    given = {
        "wkv.weight": randn(512, H, seed=1, std=H**-0.5),
        "wgate.weight": randn(512, H, seed=2, std=4 * H**-0.5),
        "norm.weight": randn(512, seed=3, std=0.1) + 1,
    }
    x = randn(31, H, seed=4)
    layer = compressor.Compressor(ours(), weights("layers.2.attn.compressor", given), 2, Switches())
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 2}
    module = HCACompressor(theirs(compress_rates=rates))
    zeros = torch.zeros(2, 512)  # V4.1 has no bias by place in the group
    put(
        module,
        kv_proj__weight=given["wkv.weight"],
        gate_proj__weight=given["wgate.weight"],
        norm__weight=given["norm.weight"],
        position_bias=zeros,
    )
    want = module(x.float()[None], torch.zeros(1, len(x), dtype=torch.int64))[0][0, 0]  # at position 0 nothing turns
    got = layer(x, 0, begun(ours(), len(x)).rings[2])
    assert got.shape == (15, 512)
    assert rms_error(got, want) < 2**-8

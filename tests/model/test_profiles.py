"""KV profiles and activation quantisation: what each stores, where each rounds, and that each moves the result."""

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import cache, linear, rope
from deepinfer_sm80.model.attention import Step
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.model.switches import KV_PROFILES, Switches
from deepinfer_sm80.ops.formats import e2m1, e4m3, mxfp4, nvfp4

pytestmark = pytest.mark.usefixtures("one_thread")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def distinct(values, scale, group):
    return set((values.float().unflatten(-1, (-1, group)) / scale[..., None]).flatten().tolist())


def test_profiles_are_those_of_the_switches():
    assert cache.PROFILES.keys() == KV_PROFILES.keys()
    with pytest.raises(UnsupportedOptionError, match="kv_profile='fp4': allowed is one of fp8_584, sm100, official"):
        Switches(kv_profile="fp4")


def test_window_rows_of_sm100_are_e4m3_in_every_dim():
    table = rope.table(preset("tiny"), True, 50)
    latent = randn(20, 512).bfloat16()
    rotated = rope.rotate(latent, table[:20])
    rows = cache.as_recorded(latent, table[:20], cache.PROFILES["sm100"].window)
    assert rows.dtype == torch.bfloat16
    amax = rotated.float().unflatten(-1, (16, 32)).abs().amax(-1)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448))).float()
    grid = set(e4m3.decode(torch.arange(256, dtype=torch.uint8)).tolist())
    assert distinct(rows, scale, 32) <= grid
    nearest = e4m3.decode(e4m3.encode(rotated.float().unflatten(-1, (16, 32)) / scale[..., None])) * scale[..., None]
    assert torch.equal(rows.float(), nearest.flatten(1))
    default = cache.as_recorded(latent, table[:20])
    assert torch.equal(default[:, 448:], rotated[:, 448:]), "bfloat16 there"
    assert not torch.equal(rows[:, 448:], rotated[:, 448:])


def test_compressed_rows_of_the_official_profile_use_every_code():
    rotated = (randn(400, 512) * torch.logspace(-2, 2, 400)[:, None]).bfloat16()
    rows = cache.PROFILES["official"].compressed(rotated)
    packed, scale = nvfp4.encode(rotated)
    assert distinct(rows, e4m3.decode(scale), 16) == set(e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist())
    assert e2m1.unpack(packed).unique().tolist() == list(range(16))
    assert (rows.float() - rotated.float()).abs().max() <= 2**-2 * rotated.float().abs().max()
    assert torch.equal(cache.PROFILES["official"].window(rotated), cache.PROFILES["sm100"].window(rotated))


def test_index_vectors_of_the_official_profile_are_mxfp4():
    x = randn(30, 32, 128)
    found = cache.PROFILES["official"].index_vectors(x)
    assert torch.equal(found.values, mxfp4.decode(*mxfp4.encode(x)))
    assert (found.scale == 1).all()
    assert found.scale.shape == (30, 32)
    assert torch.equal(found.values.bfloat16().float(), found.values)


@pytest.mark.parametrize("switches", [{"kv_profile": "sm100"}, {"kv_profile": "official"}, {"activation_quant": True}])
def test_each_switch_moves_the_result_and_chunks_still_give_the_same_bits(micro_model, prompt, whole, switches):
    model, exact = micro_model(**switches), whole[0].hidden[:150]
    out = model.step(prompt[:150], model.new_state())
    change = (out.hidden.float() - exact.float()).square().mean().sqrt() / exact.float().square().mean().sqrt()
    assert 1e-3 < change < 0.7
    state = model.new_state()
    parts = [model.step(prompt[a:b], state).hidden for a, b in ((0, 77), (77, 78), (78, 150))]
    assert torch.equal(torch.cat(parts), out.hidden)


def test_official_and_sm100_differ_in_compressed_layers_only(micro_model, prompt):
    caches = []
    for profile in ("sm100", "official"):
        model = micro_model(kv_profile=profile)
        state = model.new_state()
        model.step(prompt[:50], state)
        caches.append(state)
    a, b = caches
    at = torch.arange(50)
    assert torch.equal(a.read_window(0, at), b.read_window(0, at))
    assert torch.equal(a.read_window(1, at), b.read_window(1, at))
    assert not torch.equal(a.read_compressed(1, at[:25]), b.read_compressed(1, at[:25]))
    assert not torch.equal(a.read_window(2, at), b.read_window(2, at))


def test_activations_are_rounded_in_front_of_quantised_matrices_only(micro_model):
    layer = micro_model(activation_quant=True).layers[2]
    x = randn(3, 64).bfloat16()
    rounded = linear.as_mxfp8(x)
    assert not torch.equal(rounded, x)
    expert, plain = layer.experts.experts[0], micro_model().layers[2].experts.experts[0]
    assert torch.equal(expert.activation(x), linear.as_mxfp8(plain.activation(rounded)))
    assert torch.equal(layer.experts.route(x)[1], micro_model().layers[2].experts.route(x)[1]), "the gate is bfloat16"
    kv_norm, wkv = layer.attention.kv_norm, layer.attention.wkv
    state = micro_model().new_state()
    state.begin(torch.zeros(3, dtype=torch.int64))
    layer.attention.write(x, Step(state, torch.arange(3), 0))
    kv = linear.rms_norm(linear.project(rounded, wkv), kv_norm, 1e-20)
    assert torch.equal(state.read_window(2, torch.arange(3)), cache.as_recorded(kv, layer.attention.cos_sin[:3]))


def test_the_input_of_every_fp8_and_fp4_matrix_is_rounded_but_wo_as_and_no_other(choosy, monkeypatch):
    """By the names of the checkpoint: every product of a whole pass is looked at."""
    names, rounded, kinds = {}, {}, {}
    matrix, multiply = linear.Weights.matrix, {name: getattr(linear, name) for name in ("product", "project")}

    def named(self, name):
        found = matrix(self, name)
        names[found.untyped_storage().data_ptr()] = name
        kinds[name] = self.source.headers[f"{name}.weight"][0]
        return found

    def watched(how):
        def watch(x, weight):
            name = names[weight.untyped_storage().data_ptr()]
            rounded.setdefault(name, set()).add(torch.equal(linear.as_mxfp8(x), x))
            return multiply[how](x, weight)

        return watch

    monkeypatch.setattr(linear.Weights, "matrix", named)
    for how in multiply:
        monkeypatch.setattr(linear, how, watched(how))
    choosy(activation_quant=True).forward(torch.arange(60) * 37 % 1000 + 5)
    quantised = {name for name, kind in kinds.items() if kind in ("F8_E4M3", "I8") and not name.endswith(".wo_a")}
    unseen = kinds.keys() - rounded.keys()
    assert {name for name in unseen if ".experts." not in name} == {"embed"}, "not every expert is chosen"
    for name, seen in rounded.items():
        assert seen == {name in quantised}, name

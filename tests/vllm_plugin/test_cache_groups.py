"""A pipeline stage allocates the tensors of the groups it has layers of, and no others."""

from dataclasses import dataclass
from types import SimpleNamespace

from deepinfer_sm80.vllm_plugin import cache_groups, overrides


@dataclass
class Config:
    num_blocks: int
    kv_cache_tensors: list
    kv_cache_groups: list


def tensor(*layers):
    return SimpleNamespace(layers=list(layers))


def test_tensors_of_layers_on_other_stages_are_left_out(monkeypatch):
    seen = []

    def vllms(config, device, layout, kernel_block_sizes=None):
        for planned in config.kv_cache_tensors:  # as vLLM looks a tensor's group up
            next(group for group in config.kv_cache_groups if planned.layers[0] in group.layer_names)
        seen.append((config, device, layout, kernel_block_sizes))
        return {"layers.4": "cache"}

    target = "vllm.v1.worker.gpu.attn_utils.allocate_kv_cache"
    monkeypatch.setitem(overrides._originals, target, vllms)
    ring = SimpleNamespace(layer_names=[])  # its layers, 2 and 8, are on the stage before
    window = SimpleNamespace(layer_names=["layers.4", "layers.5"])
    planned = Config(7, [tensor("layers.2", "layers.8"), tensor("layers.4", "layers.5")], [ring, window])
    assert cache_groups.allocate_kv_cache(planned, "cuda", "BLHNC", [64]) == {"layers.4": "cache"}
    (given, *rest) = seen[0]
    assert given == Config(7, [planned.kv_cache_tensors[1]], [ring, window])
    assert rest == ["cuda", "BLHNC", [64]]
    assert len(planned.kv_cache_tensors) == 2

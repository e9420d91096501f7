"""What vLLM 0.33.0's own KV-cache planner answers for twelve layouts; the planner's tests compare to the block.

Run beside an installed vLLM 0.33.0 (a GPU is not needed; without one its CUDA platform is stood in for):

    PYTHONPATH=src python3 benchmarks/planner_points.py > tests/topology/vllm_planner_points.json

The specs come from vLLM's own layer methods, the groups and blocks from ``vllm/v1/core/kv_cache_planning.py``, the
tokens from ``kv_cache_utils.get_kv_cache_capacity``. Sizes are the released configuration's; memory per rank is given.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace as Stub

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from deepinfer_sm80.cli import needs
from deepinfer_sm80.model.config import ModelConfig

GIB = 2**30
CONFIG = ModelConfig()
# split, GiB for KV per stage, context, batched tokens, speculation, asynchronous scheduling
LAYOUTS = [
    ([40], [10], 131072, 8192, 0, True),
    ([40], [10], 131072, 2048, 0, True),
    ([40], [10], 1048576, 8192, 5, True),
    ([40], [4.25], 32768, 2048, 5, True),
    ([20, 20], [10, 10], 131072, 8192, 0, True),
    ([14, 26], [6.5, 5.9], 1048576, 2048, 5, False),
    ([8, 12, 20], [9, 9, 7.5], 262144, 2048, 5, True),
    ([14, 14, 12], [6.54, 5.13, 7.14], 1048576, 2048, 5, False),
    ([13, 14, 13], [7, 6, 5], 1048576, 4096, 5, True),
    ([8, 6, 6, 20], [12, 12, 12, 3], 65536, 2048, 3, True),
    ([7, 7, 7, 7, 7, 5], [5.8, 7.4, 5.3, 5.4, 5.4, 9.0], 1048576, 2048, 5, False),
    ([5] * 8, [20, 21, 21, 21, 19, 19, 19, 9], 131072, 2048, 7, True),
]


def use_vllm():
    """vLLM's planner modules, with a CUDA platform of capability 8.0 where there is none."""
    try:
        import vllm.platforms as platforms
    except ModuleNotFoundError as error:
        needs.leave("benchmarks/planner_points.py", error)

    if not platforms.current_platform.is_cuda():
        from vllm.platforms.cuda import CudaPlatformBase
        from vllm.platforms.interface import DeviceCapability

        class Ampere(CudaPlatformBase):
            @classmethod
            def get_device_capability(cls, device_id=0):
                return DeviceCapability(8, 0)

            @classmethod
            def get_device_name(cls, device_id=0):
                return "stand-in of capability 8.0"

        platforms.current_platform = Ampere()
    names = (
        "v1.core.kv_cache_planning",
        "v1.core.kv_cache_utils",
        "v1.kv_cache_layout",
        "models.deepseek_v41.attention",
        "models.deepseek_v41.compressor",
        "v1.attention.backends.mla.sparse_swa",
    )
    return [importlib.import_module(f"vllm.{name}") for name in names]


def configuration(layout, context, batched, speculation, asynchronous, pp):
    """The parts of a VllmConfig that the planner and the layers' specs read."""
    cache = Stub(
        block_size=128,
        cache_dtype="fp8_ds_mla",
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    return Stub(
        cache_config=cache,
        model_config=Stub(max_model_len=context, original_max_model_len=context, supports_kv_cache_grouping=False),
        attention_config=Stub(hisparse_config=None, indexer_sparse_logits=False),
        parallel_config=Stub(decode_context_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=pp),
        scheduler_config=Stub(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        num_prefill_lookahead_tokens=1 if speculation else 0,
        max_in_flight_tokens=batched * (pp + int(asynchronous)),
    )


def specs(modules, config, first, end, speculation, last):
    """Name -> spec of every cache on a worker that holds layers [first, end), by vLLM's own ``get_kv_cache_spec``."""
    import torch

    attention, compressor, window = modules[3:]
    ratios, found = CONFIG.compress_ratios, {}
    read = {max(s for s in CONFIG.kv_source_layer_ids if s <= i) for i in range(first, end) if ratios[i]}
    rows = max(8, 1 << (speculation + 1).bit_length())
    for layer in sorted({*range(first, end), *read}):
        if layer in read:
            main = Stub(
                is_kv_source=True,
                kv_cache_dtype="fp8_ds_mla",
                head_dim=CONFIG.head_dim,
                kv_cache_torch_dtype=torch.uint8,
                compress_ratio=ratios[layer],
                kv_page_alignment=576,
                compressed_bytes_per_token=584,
            )
            found[f"{layer}.kv"] = attention.DeepseekV4Attention.get_kv_cache_spec(main, config)
            index = Stub(
                cache_config=config.cache_config,
                head_dim=attention._indexer_k_cache_head_dim(CONFIG.index_head_dim, False),
                dtype=torch.uint8,
                compress_ratio=ratios[layer],
                sparse_logits=False,
                rocm_mxfp4=False,
            )
            found[f"{layer}.index"] = attention.DeepseekV4IndexerCache.get_kv_cache_spec(index, config)
            if ratios[layer] > 1:
                ring = Stub(block_size=rows, state_dim=2 * CONFIG.head_dim, dtype=torch.float32)
                found[f"{layer}.ring"] = compressor.CompressorStateCache.get_kv_cache_spec(ring, config)
        if first <= layer < end:
            found[f"{layer}.window"] = _window(window, config, torch)
    if last and speculation:
        for layer in range(40, 40 + CONFIG.num_nextn_predict_layers):
            found[f"{layer}.window"] = _window(window, config, torch)
    return found


def _window(module, config, torch):
    layer = Stub(
        cache_config=config.cache_config,
        bounded_replay=True,
        block_size=32,
        head_dim=CONFIG.head_dim,
        dtype=torch.uint8,
        window_size=CONFIG.sliding_window,
        packed_bytes_per_token=584,
        packed_page_alignment=576,
        packed_block_stride_alignment=None,
    )
    return module.DeepseekV4SWACache.get_kv_cache_spec(layer, config)


def point(modules, split, gib, context, batched, speculation, asynchronous):
    planning, utils, layouts = modules[:3]
    pp = len(split)
    config = configuration(layouts.KVCacheLayout.BLHNC, context, batched, speculation, asynchronous, pp)
    edges = [sum(split[:i]) for i in range(pp + 1)]
    workers = [specs(modules, config, edges[i], edges[i + 1], speculation, i == pp - 1) for i in range(pp)]
    memory = [int(g * GIB) for g in gib]
    groups = planning.get_global_kv_cache_groups(config, workers)
    planned = planning.get_kv_cache_configs(config, workers, memory, groups)
    block_bytes = [
        planning._pool_bytes_per_block(config, planning._project_kv_cache_groups_to_worker(groups, worker))
        for worker in workers
    ]
    tokens, concurrency = utils.get_kv_cache_capacity(config, utils.generate_scheduler_kv_cache_config(planned))
    return {
        "split": split,
        "kv_bytes": memory,
        "context": context,
        "batched_tokens": batched,
        "speculation": speculation,
        "async_scheduling": asynchronous,
        "groups": sorted(sorted(group.layer_names) for group in groups),
        "block_bytes": block_bytes,
        "blocks": planned[0].num_blocks,
        "tokens": tokens,
        "contexts": concurrency,
    }


def main():
    from importlib.metadata import version

    modules = use_vllm()
    points = [point(modules, *layout) for layout in LAYOUTS]
    lines = ",\n".join(json.dumps(p) for p in points)
    print(f'{{"vllm": "{version("vllm")}", "made_by": "benchmarks/planner_points.py", "points": [\n{lines}\n]}}')


if __name__ == "__main__":
    main()

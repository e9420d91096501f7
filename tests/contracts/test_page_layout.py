"""Byte offsets of the two page layouts."""

import torch

from deepinfer_sm80.ops.kv_cache import layout


def test_views_and_offsets_name_the_same_bytes():
    for record_bytes, offsets, views in (
        (584, layout.record_offsets, layout.record_views),
        (132, layout.index_key_offsets, layout.index_key_views),
    ):
        stride, start = 64 * record_bytes + 40, 24
        storage = torch.arange(3 * stride + start, dtype=torch.int32).to(torch.int32)
        cache = storage.as_strided((3, 64, record_bytes), (stride, record_bytes, 1), start)
        data, scales = views(cache)
        seen = []
        for slot in (0, 1, 63, 64, 191):
            at = offsets(cache, slot)
            assert data[slot // 64, slot % 64, 0] == start + at[0]
            assert scales[slot // 64, slot % 64, 0] == start + at[1]
            seen += at
        assert len(set(seen)) == len(seen)
        assert data.shape[-1] + scales.shape[-1] == record_bytes
        ours = torch.cat((data[1].flatten(), scales[1].flatten())).sort().values
        assert torch.equal(ours, torch.arange(64 * record_bytes, dtype=torch.int32) + start + stride)


def test_constants():
    assert layout.RECORD_BYTES == 584
    assert layout.DATA_BYTES == 576
    assert layout.INDEX_RECORD_BYTES == 132
    assert layout.NOPE_DIM + layout.ROPE_DIM == layout.HEAD_DIM

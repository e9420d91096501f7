"""Engram's lookup and the compressed cache's writer: what they hand from vLLM's call to the operator."""

from __future__ import annotations

import pytest
import torch

from deepinfer_sm80.errors import UnsupportedOptionError
from deepinfer_sm80.model import rope
from deepinfer_sm80.model.cache import as_recorded
from deepinfer_sm80.model.config import preset
from deepinfer_sm80.ops.engram.engram_lookup.reference import engram_lookup
from deepinfer_sm80.ops.kv_cache.dequantize_and_gather_k_cache.reference import read_record
from deepinfer_sm80.vllm_plugin.compressor import rope_quant_insert
from deepinfer_sm80.vllm_plugin.engram import lookup

ROWS = 60


def generator(seed):
    return torch.Generator().manual_seed(seed)


class Table:
    """vLLM's embedding on one rank: some hash columns, some rows of the table, E4M3 by name."""

    peer_rows = False

    def __init__(self, head_start, columns, first, end):
        self.head_start, self.part_n_hash_cols = head_start, columns
        self.vocab_start_idx, self.vocab_end_idx = first, end
        codes = torch.randint(0, 256, (ROWS, 256), dtype=torch.uint8, generator=generator(1)) & 0xBF
        scale = torch.randint(120, 130, (ROWS, 8), dtype=torch.uint8, generator=generator(2))
        self.codes, self.scale = codes[first:], scale[first:]  # what lies behind the end is another rank's

    def _storage(self):
        return self.codes.view(torch.float8_e4m3fn), self.scale


@pytest.mark.parametrize("rank", [(0, 24, 0, ROWS), (6, 6, 0, ROWS), (0, 24, 20, 40), (18, 6, 40, ROWS)], ids=str)
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_reads_its_own_columns_and_rows(rank, background):
    table, ids = Table(*rank), torch.randint(0, ROWS, (7, 24), generator=generator(3))
    out = torch.full((7, rank[1], 256), torch.nan, dtype=torch.bfloat16)
    lookup(table, ids, out, background)
    assert torch.equal(out, engram_lookup(table.codes, table.scale, ids, *rank))
    assert out.any()


@pytest.mark.parametrize(("peers", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_a_table_that_is_kept_otherwise_is_refused(peers, dtype):
    table = Table(0, 24, 0, ROWS)
    table.peer_rows = peers
    found = "a table split over peer GPUs" if peers else "a table read as torch.float16"
    with pytest.raises(UnsupportedOptionError, match=f"--engram-config={found}"):
        lookup(table, torch.zeros(1, 24).long(), torch.empty(1, 24, 256, dtype=dtype))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("fp8_scale", [None, torch.ones(1)])
def test_latents_go_to_their_slots_turned_where_their_row_begins(ratio, fp8_scale):
    T, pages = 9, torch.full((2, 32, 584), 0xFF, dtype=torch.uint8)
    positions, table = torch.arange(31, 31 + T), rope.table(preset("tiny"), True, 64)
    closing = (positions + 1) % ratio == 0
    slots = torch.where(closing, torch.arange(60, 60 - 3 * T, -3), -1)
    latent = torch.randn(T, 512, generator=generator(4)).bfloat16()
    assert rope_quant_insert(latent, positions, table, pages, slots, ratio, fp8_scale) is None
    want = as_recorded(latent, table[positions // ratio * ratio])
    for t in range(T):
        if closing[t]:
            assert torch.equal(read_record(pages, int(slots[t])), want[t])

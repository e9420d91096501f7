"""Index combination and mapping, the indexer, Engram, the order of experts: time and agreement on this GPU.

python3 benchmarks/microbench_sm80_part3.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native]
"""

import sys

from microbench import main

OPERATORS = [
    "combine_topk_swa_indices",
    "global_topk_indices",
    "indexer_topk",
    "select_candidate_blocks",
    "indexer_logits_paged",
    "indexer_logits_prefill",
    "indexer_q_rope_quant",
    "indexer_k_norm_rope_store",
    "engram_lookup",
    "stable_expert_order",
]

if __name__ == "__main__":
    sys.exit(main(OPERATORS, __doc__))

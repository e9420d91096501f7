"""Sparse MLA, gather and writer of the KV cache, output projection: time and agreement on this GPU.

python3 benchmarks/microbench_sm80_kernels.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native]
"""

import sys

from microbench import main

OPERATORS = [
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "dequantize_and_gather_k_cache",
    "rope_quant_insert",
    "inverse_rope_grouped",
    "grouped_output_projection",
]

if __name__ == "__main__":
    sys.exit(main(OPERATORS, __doc__))

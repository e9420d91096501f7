"""Sparse MLA decode and prefill, and the gather of the KV cache: time and agreement on this GPU.

python3 benchmarks/microbench_sm80_kernels.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native]
"""

import sys

from microbench import main

OPERATORS = [
    "sparse_mla_decode",
    "sparse_mla_prefill",
    "dequantize_and_gather_k_cache",
]

if __name__ == "__main__":
    sys.exit(main(OPERATORS, __doc__))

"""The residual streams: mhc_post and mhc_fused_post_pre_delayed, time and agreement on this GPU.

python3 benchmarks/microbench_sm80_part2.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native]
"""

import sys

from microbench import main

OPERATORS = [
    "mhc_post",
    "mhc_fused_post_pre_delayed",
]

if __name__ == "__main__":
    sys.exit(main(OPERATORS, __doc__))

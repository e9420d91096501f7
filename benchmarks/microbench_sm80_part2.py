"""The residual streams: mhc_post, time and agreement on this GPU.

python3 benchmarks/microbench_sm80_part2.py [--quick] [--json] [--op OPERATOR] [--lowering sm80|sm86|native]
"""

import sys

from microbench import main

OPERATORS = [
    "mhc_post",
]

if __name__ == "__main__":
    sys.exit(main(OPERATORS, __doc__))

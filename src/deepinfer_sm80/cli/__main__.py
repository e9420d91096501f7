"""``python -m deepinfer_sm80.cli``, for an install whose scripts are not on PATH."""

import sys

from deepinfer_sm80.cli import main

sys.exit(main())

"""DeepSeek-V4.1 on Ampere. Importing this package imports neither torch nor CUDA."""

__version__ = "0.1.0"

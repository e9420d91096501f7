"""Number formats as integer arithmetic on ``uint8`` codes: E4M3, UE8M0 scales, MXFP4 groups, FP8 32x32 blocks.

Plain PyTorch without any float8 dtype, so it runs on every device; free of host synchronisation, so it may be captured
in a CUDA graph. References and launchers both build on it; device code has helpers of its own.
"""

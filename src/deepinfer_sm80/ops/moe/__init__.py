"""Mixture of experts: what stands around vLLM's Marlin kernels."""

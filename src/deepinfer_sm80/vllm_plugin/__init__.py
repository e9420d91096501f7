"""vLLM entry point. vLLM calls ``register`` in every process it starts; importing this module loads nothing."""

from __future__ import annotations


def register() -> None:
    """Register the Ampere form of DeepSeek-V4.1 with the vLLM of this process, where it applies.

    Called by vLLM through the entry-point group ``vllm.general_plugins``, once or more in every process: repeated calls
    change nothing. On a GPU that is not compute capability 8.x nothing is registered. Never touches CUDA.
    """
    from deepinfer_sm80.vllm_plugin.activation import register as register_with_vllm

    register_with_vllm()

"""DeepSeek-V4.1 as vLLM builds it on compute capability 8.x. vLLM imports this when such a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.models.deepseek_v41.common.mm_preprocess import (
    DeepseekV4VLDummyInputsBuilder,
    DeepseekV4VLMultiModalProcessor,
)
from vllm.models.deepseek_v41.nvidia import dspark, vl_model
from vllm.multimodal import MULTIMODAL_REGISTRY

from deepinfer_sm80 import __version__
from deepinfer_sm80.vllm_plugin.expert_filter import left_out_on_this_rank
from deepinfer_sm80.vllm_plugin.expert_padding import report_saved_memory
from deepinfer_sm80.vllm_plugin.images import TextOnlyProcessingInfo, leave_out_vision_tower, refuse_image_inputs
from deepinfer_sm80.vllm_plugin.kernels import finish_warmup, start_warmup
from deepinfer_sm80.vllm_plugin.overrides import OVERRIDES, apply_overrides
from deepinfer_sm80.vllm_plugin.requirements import check_config
from deepinfer_sm80.vllm_plugin.weights import checked
from deepinfer_sm80.vllm_plugin.window import installed_vllm

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

# Under vLLM's name, so that the line follows vLLM's logging configuration.
logger = init_logger("vllm.deepinfer_sm80")

apply_overrides()


@MULTIMODAL_REGISTRY.register_processor(
    DeepseekV4VLMultiModalProcessor, info=TextOnlyProcessingInfo, dummy_inputs=DeepseekV4VLDummyInputsBuilder
)
class DeepseekV41ForCausalLM(vl_model.DeepseekV41ForCausalLM):
    """vLLM's DeepSeek-V4.1, text only, with this package's operators in every layer."""

    _starting = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_config(vllm_config)
        leave_out_vision_tower(vllm_config)
        self._left_out = left_out_on_this_rank(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        logger.info_once(
            "DeepInfer-SM80 %s serves DeepSeek-V4.1 with vLLM %s: sparse MLA, indexer, Engram and cache writers for "
            "compute capability 8.x, %d vLLM functions replaced; experts and linears stay vLLM's Marlin, mHC vLLM's "
            "TileLang.",
            __version__,
            installed_vllm(),
            len(OVERRIDES),
        )
        report_saved_memory(self)
        self._warmup = start_warmup(vllm_config)

    def embed_multimodal(self, **kwargs: object) -> Any:
        refuse_image_inputs(kwargs)
        return []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's, with the checks of ``weights.checked``: of the whole checkpoint until vLLM has started."""
        return super().load_weights(
            checked(weights, self.config, part="text", whole=self._starting, left_out=self._left_out)
        )

    def process_weights_after_loading(self) -> None:
        """vLLM's hook at the end of its start, whichever way it loaded. Weights that come later are updates."""
        super().process_weights_after_loading()
        if self._starting:
            finish_warmup(self._warmup)
            self._starting = False


class DSparkDeepseekV4ForCausalLM(dspark.DSparkDeepseekV4ForCausalLM):
    """vLLM's DSpark draft; its layers take the same attention class as the target's."""

    _starting = True

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        check_config(vllm_config, draft=True)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        report_saved_memory(self)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As the target's."""
        return super().load_weights(checked(weights, self.config, part="draft", whole=self._starting))

    def process_weights_after_loading(self) -> None:
        """vLLM's hook at the end of its start."""
        self._starting = False

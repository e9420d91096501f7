"""Text only: images are refused by name, before anything is downloaded into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessingInfo

from deepinfer_sm80.errors import ImageInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig


class TextOnlyProcessingInfo(DeepseekV4VLProcessingInfo):
    """Declares an image limit of 0 and refuses a prompt that holds one."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 0}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        if modality == "image" and num_items > 0:
            raise ImageInputError(found=num_items)
        super().validate_num_items(modality, num_items)


def leave_out_vision_tower(vllm_config: VllmConfig) -> None:
    """Make vLLM stub the vision tower and skip its weights, as ``--limit-mm-per-prompt '{"image": 0}'`` does."""
    multimodal: Any = vllm_config.model_config.multimodal_config
    if multimodal is not None and multimodal.get_limit_per_prompt("image") != 0:
        multimodal.language_model_only = True

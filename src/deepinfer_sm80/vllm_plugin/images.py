"""Text only: images and image embeddings are refused by name, before anything is downloaded into the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.models.deepseek_v41.common.mm_preprocess import DeepseekV4VLProcessingInfo

from deepinfer_sm80.errors import ImageInputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.inputs import MultiModalDataDict
    from vllm.multimodal.parse import MultiModalDataItems


class TextOnlyProcessingInfo(DeepseekV4VLProcessingInfo):
    """Declares an image limit of 0 and refuses a prompt that holds one."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 0}

    def validate_num_items(self, modality: str, num_items: int) -> None:
        if modality == "image" and num_items > 0:
            raise ImageInputError(found=num_items)
        super().validate_num_items(modality, num_items)

    def parse_mm_data(self, mm_data: MultiModalDataDict, *, validate: bool = True) -> MultiModalDataItems:
        """As vLLM's; raises ImageInputError for an image in any form.

        vLLM does not count embeddings where the image limit is 0 and ``--enable-mm-embeds`` is set, which it also sets
        by itself for the consumer of a KV connector.
        """
        items = super().parse_mm_data(mm_data, validate=False)
        found = items.get_count("image", strict=False)
        if found > 0:
            raise ImageInputError(found=found)
        return super().parse_mm_data(mm_data, validate=True) if validate else items


def refuse_image_inputs(inputs: Mapping[str, object]) -> None:
    """Raise ImageInputError for inputs of the vision tower that reached the model without vLLM's front end."""
    given = sorted(name for name, value in inputs.items() if value is not None)
    if given:
        raise ImageInputError(found=f"the {', '.join(given)} of at least 1")


def leave_out_vision_tower(vllm_config: VllmConfig) -> None:
    """Make vLLM stub the vision tower and skip its weights, as ``--limit-mm-per-prompt '{"image": 0}'`` does."""
    multimodal: Any = vllm_config.model_config.multimodal_config
    if multimodal is not None and multimodal.get_limit_per_prompt("image") != 0:
        multimodal.language_model_only = True

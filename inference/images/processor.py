"""Loads the processor of a target that reads images: it turns pictures into tensors, and their places into tokens."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoProcessor, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

VIDEOS = "video_processor"


def load_processor(folder: Path, trust_remote_code: bool = False) -> ProcessorMixin:
    """The processor saved in a folder; raises ValueError, naming the folder, if it has none that reads pictures."""
    try:
        processor = load_with_images_alone(folder, trust_remote_code)
        reason = f"its {type(processor).__name__} has no image_token"
    except Exception as error:  # files that are damaged or missing raise anything
        processor, reason = None, " ".join(str(error).split())[:200]
    if isinstance(processor, ProcessorMixin) and isinstance(vars(processor).get("image_token"), str):
        return processor
    needed = "preprocessor_config.json and processor_config.json of a model that reads images are needed"
    raise ValueError(f"{folder}: no processor reads pictures ({reason}); {needed}: copy or download the model again")


def load_with_images_alone(folder: Path, trust_remote_code: bool) -> ProcessorMixin:
    """The processor; without its part for videos if that part needs a package that is not installed (torchvision)."""
    try:
        return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ImportError:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        kind = getattr(transformers, PROCESSOR_MAPPING_NAMES.get(config.model_type, ""), None)
        if kind is None or VIDEOS not in kind.get_attributes():
            raise
        parts = [name for name in kind.get_attributes() if name != VIDEOS]
        without_videos: Any = type(kind.__name__, (kind,), {"get_attributes": classmethod(lambda _: parts)})
        return without_videos.from_pretrained(folder)

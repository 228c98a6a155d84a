"""The images of a prompt, as the target's own processor has prepared them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor

TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")  # [1, prompt]; 0 is text, and the names by which models take them


@dataclass(frozen=True)
class Images:
    """What the target's forward takes of a prompt with images, besides its tokens.

    The prompt has one placeholder token for each feature of an image. It is read in one pass up to the end of its last
    image; after that it is text like any other.
    """

    inputs: Mapping[str, Tensor]  # arguments of the model's forward, such as pixel_values and image_grid_thw
    end: int  # tokens of the prompt up to the end of the last image
    digest: int = field(init=False)  # of the pixels: prompts of the same tokens may show other images

    def __post_init__(self) -> None:
        found = xxhash.xxh3_128()
        for name, tensor in sorted(self.inputs.items()):
            if name not in TOKEN_TYPES:
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
        object.__setattr__(self, "digest", found.intdigest())

    @classmethod
    def of(cls, encoded: Mapping[str, Tensor], placeholders: tuple[int, ...]) -> "Images":
        """From the output of a processor for one prompt; `placeholders` are the token ids that stand for images."""
        (ids,) = encoded["input_ids"].tolist()
        (end,) = [place for place, token in enumerate(ids, start=1) if token in placeholders][-1:] or [len(ids)]
        return cls({k: v for k, v in encoded.items() if k not in ("input_ids", "attention_mask")}, end)

    def arguments(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """The arguments for a pass over the first `end` tokens of the prompt."""
        cut = {name: self.inputs[name][:, : self.end] for name in TOKEN_TYPES if name in self.inputs}
        moved = {name: tensor.to(device) for name, tensor in {**self.inputs, **cut}.items()}
        return {name: each.to(dtype) if each.is_floating_point() else each for name, each in moved.items()}

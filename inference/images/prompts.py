"""The one way from conversations with pictures to a target's prompts: their tokens, and what its image tower reads."""

import copy
import reprlib
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any

from torch import Tensor
from transformers import ProcessorMixin

from headstart.common.errors import wrong_value
from headstart.heads.target_config import folder_of
from headstart.inference.core.request import Images
from headstart.inference.images.pictures import Json, trial_picture
from headstart.inference.images.processor import load_processor
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import TargetSection

MARKS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token")  # of processors and tokenizers
PICTURE: Json = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}


class ImagePrompts:
    """Encodes conversations with pictures for one target. Several threads may use it at once."""

    def __init__(self, template: ChatTemplate, processor: ProcessorMixin) -> None:
        """The processor's own template is used if the tokenizer's leaves pictures out, and for texts too if the
        tokenizer has none. Raises ValueError if both leave pictures out."""
        if not template.exists:
            template.tokenizer.chat_template = processor.chat_template
        self.processor, self.lock, self.template = processor, Lock(), template
        self.place = str(vars(processor)["image_token"])  # written by the template for each picture
        found = [getattr(owner, name, None) for owner in (processor, processor.tokenizer) for name in MARKS]
        self.marks = {mark for mark in found if isinstance(mark, str)}
        vocab = template.tokenizer.get_vocab()
        self.placeholders = tuple(vocab[mark] for mark in self.marks if mark in vocab)
        if not self.writes_place:
            tokenizer = copy.copy(template.tokenizer)
            tokenizer.chat_template = processor.chat_template
            self.template = ChatTemplate(tokenizer, template.settings)
        if not self.writes_place:
            raise ValueError(f"the target's chat template writes no {self.place} for a picture")

    @property
    def writes_place(self) -> bool:
        """Whether the chat template writes one place for a picture."""
        try:
            return self.template.exists and self.template.render([PICTURE]).count(self.place) == 1
        except Exception:  # a template may raise anything; this one takes no parts
            return False

    def encode(
        self, messages: Sequence[Json], pictures: list[Any], tools: list[Json] | None = None, **more: Any
    ) -> Images:
        """Messages and pictures as `read_pictures` gives them, as one prompt; `more` are arguments of `render`."""
        self.refuse_marks(messages, tools)
        return self.encode_text(self.template.render(messages, tools, **more), pictures)

    def refuse_marks(self, messages: Sequence[Json], tools: list[Json] | None) -> None:
        """Raise ValueError for words that would be read as the place of a picture."""
        for place, text in [*texts_in("messages", messages), *texts_in("tools", tools or [])]:
            if mark := next((mark for mark in self.marks if mark in text), None):
                allowed = f"with pictures, a text without the target's mark {mark} is"
                raise wrong_value(place, reprlib.repr(text), allowed, "spell it otherwise, such as with a space")

    def encode_text(self, text: str, pictures: list[Any]) -> Images:
        """Rendered text and the pictures for its places. Raises ValueError for another number of places."""
        if (places := text.count(self.place)) != len(pictures):
            given = f"{len(pictures)} pictures, for which the target's chat template writes {places} places,"
            remedy = "send pictures in the user's messages" if places < len(pictures) else "send one for each place"
            raise wrong_value("messages", given, "one place for each picture is", remedy)
        try:
            with self.lock:
                given = self.processor(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # such as for a picture that is 200 times as wide as high
            refused = f"pictures that the target's processor refuses ({' '.join(str(error).split())[:200]})"
            raise wrong_value("messages", refused, "pictures of usual shapes are", "change them") from None
        if other := [name for name, value in given.items() if not isinstance(value, Tensor)]:
            raise ValueError(f"messages: the target's processor gives {other[0]} not as one tensor; send one picture")
        return Images.of(given, self.placeholders)


def texts_in(place: str, value: Any) -> Iterator[tuple[str, str]]:
    """Every text in nested values, with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from texts_in(f"{place}.{name}", each)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from texts_in(f"{place}[{index}]", each)


def image_prompts(section: TargetSection, template: ChatTemplate, target: TargetModel) -> ImagePrompts | str:
    """How to encode pictures for a loaded target, or why they are refused: a small one is tried."""
    if not target.passes.reads_images:
        return "the target has no image tower"
    try:
        prompts = ImagePrompts(template, load_processor(folder_of(section), section.trust_remote_code))
        images = prompts.encode([PICTURE], [trial_picture()])
        target.refuse_images(images.prompt(target.config.vocab_size), images)
    except ValueError as error:
        return str(error)
    return prompts

"""The pictures of a run's prompts, kept in its folder under the digests of their files, and the processor that reads
them."""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.common.files import whole_file
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.inference.core.request import GREEDY, Images, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.images.pictures import Sources, picture_file, read_picture
from headstart.inference.images.processor import load_processor
from headstart.inference.images.prompts import ImagePrompts
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes import Recipe

Kept = Mapping[str, Any]  # a prompt's `text`, with one mark for each picture, and the digests of its `pictures`
ROUNDS_IN_MEMORY = 2  # batches of prompts with images that are in memory at once


class KeptPictures:
    """A run keeps the files themselves, so that a prompt shows the same pictures to all of its stages and machines."""

    def __init__(self, recipe: Recipe, template: ChatTemplate | None = None) -> None:
        self.folder, self.target, self._template = recipe.prompts_dir / "pictures", recipe.target, template

    @property
    def prompts(self) -> ImagePrompts:
        """How the target's processor reads pictures; raises ValueError if it has none."""
        if isinstance(self._prompts, str):
            raise ValueError(self._prompts)
        return self._prompts

    @cached_property
    def _prompts(self) -> ImagePrompts | str:
        folder, trusted = folder_of(self.target), self.target.trust_remote_code
        try:
            return ImagePrompts(self._template or ChatTemplate.of(self.target), load_processor(folder, trusted))
        except ValueError as error:
            return str(error)

    @cached_property
    def vocab_size(self) -> int:
        return TargetConfig.from_folder(folder_of(self.target)).vocab_size

    def keep(self, name: str, source: Any, folder: Path) -> str:
        """Keep a picture, which messages call `name`, and return its digest; a path is relative to `folder`.

        Raises ValueError if it cannot be read.
        """
        content = picture_file(name, source, Sources(folder))
        digest = hashlib.sha256(content).hexdigest()
        if not (path := self.folder / digest).exists():
            read_picture(name, content, Sources())
            with whole_file(path) as partial:
                partial.write_bytes(content)
        return digest

    def read(self, kept: Kept | None) -> Images | None:
        """The images of a prompt, for the target's forward; None if it has no pictures."""
        if kept is None:
            return None
        paths = [self.folder / digest for digest in kept["pictures"]]
        pictures = [read_picture(str(path), path.read_bytes(), Sources()) for path in paths]
        return self.prompts.encode_text(kept["text"], pictures)

    def request(self, row: Mapping[str, Any], max_new_tokens: int, sampling: Sampling = GREEDY) -> Request:
        """The request for a row of prompts: its `tokens`, and `images` if it shows any."""
        return Request(row["tokens"], max_new_tokens, sampling, images=self.read(row.get("images")))

    def prompt_of(self, kept: Kept) -> list[int]:
        """The tokens of a prompt with pictures, as a request and heads take them."""
        images = self.read(kept)
        assert images is not None
        return images.prompt(self.vocab_size)

"""Which model a name means, and what engines do with its family; no weights are read."""

import difflib
from importlib.util import find_spec
from pathlib import Path

from transformers import __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from headstart.common.errors import wrong_value
from headstart.heads.files import read_json_object
from headstart.heads.formats.config_rules import REFUSED, refusing
from headstart.heads.target_config import locate_target
from headstart.inference.targets import gguf

MODEL_TYPES = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}


def find_type(name: str) -> str:
    """The model type of a folder, its config.json, a GGUF file or a name on the hub; or the type that `name` is.

    Raises ValueError for any other name.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file() and find_spec("gguf"):
        return gguf.model_type(path)
    folder = folder_of(name)
    return name if folder is None else str(read_json_object(folder / "config.json", "target").get("model_type"))


def folder_of(name: str) -> Path | None:
    """The folder with a model's config.json, fetched if it is on the hub; None for a model type."""
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" and path.is_file() else path
    if path.suffix == ".gguf" or folder.is_dir():
        folder = locate_target(str(folder), field="NAME")
    if (folder / "config.json").is_file():
        return folder
    if name in MODEL_TYPES:
        return None
    if "/" in name and not path.exists():
        return locate_target(name, None, ["config.json"], field="NAME")
    near = difflib.get_close_matches(name, MODEL_TYPES, n=1)
    advice = f"did you mean {near[0]}?" if near else "`headstart targets` lists the model types"
    allowed = "a folder with config.json, that file, a GGUF file, a hub name (org/name) or a model type of transformers"
    raise wrong_value("NAME", repr(name), f"{allowed} {__version__} is", advice)


def engines(decoder: str) -> str:
    """Which engines refuse EAGLE-3 heads for a language model of this type."""
    by = refusing(decoder)
    others = [label for label, _ in REFUSED.values() if label not in by]
    refused = f"{' and '.join(by)} refuse{'s' * (len(by) == 1)} EAGLE-3 heads for this family" if by else ""
    unknown = f"nothing is known against EAGLE-3 heads in {' and '.join(others)}" if others else ""
    return "; ".join(filter(None, (refused, unknown)))

"""Digests of a target's small files, which stages record: of content, so that a moved folder is still the same target.

`target_identity` in heads/target_origin.py is the digest of config and weights.
"""

import hashlib
import json
from pathlib import Path

from headstart.common.files import read_json
from headstart.data_pipelines.stages.stage import Json, file_digest

WEIGHTS = "the target's config and weights"  # the name of `target_identity` among a stage's inputs
TOKENIZER_FILES = (
    "tokeniz*",  # tokenizer.json, tokenizer.model, tokenization_NAME.py
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
TOKENIZER_CONFIG = "tokenizer_config.json"  # may hold the chat template too
HOW_IT_WAS_LOADED = ("is_local", "local_files_only")  # transformers saves these arguments of from_pretrained there


def prompt_identities(folder: Path) -> Json:
    """Digests of everything in a target's folder that turns text into prompt tokens."""
    settings = read_object(folder / TOKENIZER_CONFIG)
    in_settings = settings.pop("chat_template", None)
    for name in HOW_IT_WAS_LOADED:
        settings.pop(name, None)
    paths = {path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    files = {path.name: file_digest(path) for path in paths if path.name != TOKENIZER_CONFIG}
    return {
        "the target's tokenizer": digest_of([settings, files]),
        "the target's chat template": digest_of(chat_templates(folder, in_settings)),
    }


def chat_templates(folder: Path, in_settings: object) -> Json:
    """The chat templates of a folder by name, in whichever file they are; `in_settings` is tokenizer_config's value."""
    if isinstance(in_settings, list):  # named templates, as older versions of transformers wrote them
        found = {str(item.get("name")): item.get("template") for item in in_settings if isinstance(item, dict)}
    else:
        found = {"default": in_settings}
    found["default"] = read_object(folder / "chat_template.json").get("chat_template", found.get("default"))
    for path in [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]:
        if path.is_file():
            found["default" if path.parent == folder else path.stem] = path.read_text(encoding="utf-8")
    return found


def writes_date(folder: Path) -> bool:
    """Whether a chat template of a folder writes the day on which it is rendered."""
    in_settings = read_object(folder / TOKENIZER_CONFIG).get("chat_template")
    return "strftime_now" in json.dumps(chat_templates(folder, in_settings))


def generation_identity(folder: Path) -> str | None:
    """A digest of the file that names the target's end tokens; None if there is none."""
    path = folder / "generation_config.json"
    return file_digest(path) if path.is_file() else None


def read_object(path: Path) -> Json:
    """The JSON object in a file of the target, empty if there is no such file."""
    found = read_json(path, "copy it there again") if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def digest_of(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

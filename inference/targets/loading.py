"""Loads a target's configuration, weights and device; whatever is wrong with its files becomes a ValueError."""

import json
import logging
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from headstart.common.errors import errors_as_messages, wrong_value
from headstart.common.files import whole_folder, write_text
from headstart.heads.files import read_json_object
from headstart.heads.target_config import SAFE_FILES, SOURCE, card_source, content_digest, folder_of
from headstart.heads.target_ends import auto_class
from headstart.inference.kernels import float32_is_as_fast, has_kernels
from headstart.inference.targets.architecture import attention_code
from headstart.recipes.schema import TargetSection
from headstart.recipes.target_sizes import text_section

COPY_AGAIN = "copy or download the model again"
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "bf16")  # x86 twice, then ARM
NAMED_TENSORS_MAX = 4  # in a message
ADAPTER_KEY = "headstart_adapter"  # of config.json, whose digest then tells a merged target from its base


def pick_device(name: str, field: str = "target.device") -> torch.device:
    """The device of that name; `auto` is the first CUDA device if there is one, else the CPU.

    Raises ValueError, naming the recipe's field, for a name that torch does not know, and for a device that this
    machine lacks.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong_value(field, repr(name), "auto, cpu, cuda or cuda:N is", "choose one of them") from error
    if device.type == "cpu":
        return device
    count = num_devices(device.type)
    if (device.index or 0) >= count:
        numbered = [f"{device.type}:{number}" for number in range(count)]
        raise ValueError(
            f"{field}: {name!r} given, one of {', '.join(['auto', 'cpu', *numbered])} is allowed, because torch finds "
            f"{count} {device.type} devices on this machine; choose another"
        )
    return device


def processor_name(device: torch.device) -> str:
    """The maker's name for the GPU, or for the CPU where the system knows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def fast_dtype(device: torch.device, eight_bits: bool = False) -> Literal["bfloat16", "float32"]:
    """The number format in which the device decodes fastest; float32 where both are as fast.

    On a CPU a few products are measured. With `eight_bits` the target has weights in 8 bits, as which float32 layers
    read them.
    """
    if not has_bfloat16(device):
        return "float32"
    return "float32" if device.type == "cpu" and float32_is_as_fast(eight_bits) else "bfloat16"


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16; emulation is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and any(torch.cpu.get_capabilities().get(name) for name in BFLOAT16_INSTRUCTIONS)


def slow_format(field: str, dtype: str, device: torch.device) -> str | None:
    """A hint if a CPU computes slowly in the number format of this field of the recipe, else None."""
    if device.type != "cpu" or dtype == "float32" or (dtype == "bfloat16" and has_bfloat16(device)):
        return None
    if field == "target.dtype" and has_kernels():  # they compute in float32
        return None
    return f"{field}: this CPU has no instructions for {dtype}; {field}=float32 is several times as fast here"


def num_devices(kind: str) -> int:
    """The number of devices of a kind, such as cuda, that torch can use here."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this build of torch does not know the kind
        return 0
    return int(module.device_count()) if module.is_available() else 0


def load_config(folder: Path, trust_remote_code: bool) -> PreTrainedConfig:
    """The model's configuration; raises ValueError, naming the folder, for one that transformers cannot read."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"target.trust_remote_code: false, but {folder} has a model class of its own; true is allowed: "
                f"set it if you trust the code in that folder"
            ) from error
        raise ValueError(
            f"{folder}/config.json: {in_one_line(error)}; the configuration of a causal language model that "
            f"transformers knows is required: {COPY_AGAIN}"
        ) from error


def model_without_weights(section: TargetSection) -> PreTrainedModel:
    """The target with shapes but no weights, on the meta device. Only config.json is read."""
    folder = folder_of(section, ["config.json"])
    config = load_config(folder, section.trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(
            config,
            dtype=getattr(torch, section.dtype),
            attn_implementation=attention_code(config),
            trust_remote_code=section.trust_remote_code,
        )
    refuse_encoder(model)
    return model


def refuse_encoder(model: PreTrainedModel) -> None:
    """Raise ValueError for a model whose decoder reads the states of an encoder."""
    config = model.config.to_dict()
    if config.get("is_encoder_decoder") or text_section(config).get("is_encoder_decoder"):
        raise ValueError(
            f"target.path: a {model.config.model_type!r} model given, an encoder with a decoder; a decoder alone, "
            "which continues a text, is allowed: choose another target"
        )


def load_weights(folder: Path, **options: Any) -> PreTrainedModel:
    """The model with all of its weights, as a language model, or with its other towers if there is no such class.

    Raises ValueError for files that cannot be read, and for tensors that are missing or have another shape, which
    transformers would replace by random numbers.
    """
    try:
        options["config"] = load_config(folder, options["trust_remote_code"])
        model, info = auto_class(options["config"]).from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{folder}: its weights cannot be read ({in_one_line(error)}); complete safetensors files are required: "
            f"{COPY_AGAIN}"
        ) from error
    except RuntimeError as error:
        if "conversion of the weights" not in str(error):
            raise
        raise ValueError(
            f"{folder}: transformers cannot convert its weights (its report above names them and the reason); if "
            f"that is not memory, it may not know their quantisation: give a target that it loads on this device"
        ) from error
    refuse_encoder(model)
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    wrong += [
        f"{name} is {list(shape)} but should be {list(wanted)}" for name, shape, wanted in info["mismatched_keys"]
    ]
    if wrong:
        more = f" and {len(wrong) - NAMED_TENSORS_MAX} more" if len(wrong) > NAMED_TENSORS_MAX else ""
        raise ValueError(
            f"{folder}: {'; '.join(wrong[:NAMED_TENSORS_MAX])}{more}; all tensors of a model are required: give a "
            f"model's folder, or {COPY_AGAIN}"
        )
    if model.dtype == torch.float16:
        refuse_infinite(folder, model)
    return model


@torch.no_grad()
def merge_adapter(base: Path, adapter: Path, folder: Path) -> None:
    """Write a model with a LoRA adapter merged in by peft, in the base's number format; the folder appears complete.

    `made_once` runs this. Raises ValueError for an adapter of other modules, of another size, or with missing tensors.
    """
    from peft import PeftModel, get_peft_model_state_dict

    given, remedy = f"{adapter} given for {base}", "give the adapter's own base as target.path, or train it again"
    model = load_weights(base, dtype="auto", trust_remote_code=False)
    if getattr(model, "is_quantized", False):
        raise ValueError(f"{given}, whose weights are quantised; floating point is allowed: {remedy}")
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")
    except (ValueError, RuntimeError) as error:  # for modules that the base lacks, and for sizes
        raise ValueError(f"{given} ({in_one_line(error)}); the base's modules are allowed: {remedy}") from error
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        different = sorted(get_peft_model_state_dict(adapted).keys() ^ set(file.keys()))
    if different:
        named = ", ".join(different[:NAMED_TENSORS_MAX])
        raise ValueError(f"{given}, where only one of file and model has {len(different)} tensors ({named}); {remedy}")
    with whole_folder(folder) as partial:
        adapted.merge_and_unload(safe_merge=True).save_pretrained(partial)
        for path in {path for pattern in SAFE_FILES for path in base.glob(pattern)}:
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
        digest = content_digest(adapter / "adapter_model.safetensors")
        config = {**read_json_object(base / "config.json", "target"), ADAPTER_KEY: digest}
        write_text(partial / "config.json", json.dumps(config, indent=2) + "\n")
        source = f"{card_source(base / 'README.md') or base} with the LoRA adapter {adapter} (SHA-256 {digest[:12]})"
        write_text(partial / "README.md", f"{SOURCE}{source}\n")


def refuse_infinite(folder: Path, model: PreTrainedModel) -> None:
    """Raise ValueError for weights beyond float16's range, which a cast makes infinite."""
    weights = model.named_parameters()
    if beyond := [name for name, weight in weights if not weight.is_meta and not bool(weight.isfinite().all())]:
        raise ValueError(
            f"target.dtype: float16 given, but {', '.join(beyond[:NAMED_TENSORS_MAX])} in {folder} exceeds its range; "
            "bfloat16 or float32 is allowed: choose one of them"
        )


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class MissingKernels(logging.Filter):
    """Hides transformers' lines about kernels that are not installed; `packages` have them."""

    def __init__(self) -> None:
        super().__init__()
        self.packages = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        match = re.search(r"falling back to its reference .* because `(.+?)` is not installed", record.getMessage())
        if match is not None:
            self.packages.add(match[1])
        return match is None


MISSING_KERNELS = MissingKernels()
logging.getLogger("transformers.integrations.hub_kernels").addFilter(MISSING_KERNELS)


@contextmanager
def no_bars_of_transformers() -> Iterator[None]:
    """Load or save models without transformers' progress bars, which would appear in every command.

    The hub's bars of downloads, which transformers switches too, stay.
    """
    were_on, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if were_on:
        transformers_logging.disable_progress_bar()
        if hub_bars:
            enable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            transformers_logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()


if __name__ == "__main__":
    with errors_as_messages():
        merge_adapter(*map(Path, sys.argv[1:]))

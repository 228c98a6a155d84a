"""Tiny random targets and heads: a few thousand weights, with distributions so peaked that a wrong mask shows."""

import functools
import gc
import shutil
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import shape_checks
import torch
from bad_inputs import Typed, type_command
from families import SIZES
from sound_loop import assert_sound
from tiny_run import build_run, tiny_recipe
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.common.process import user_cache
from headstart.data_pipelines.harvest import harvest
from headstart.heads.base import DraftHead
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.block import BlockHead
from headstart.heads.kinds.block_attention import Reach
from headstart.heads.kinds.block_config import BlockShape
from headstart.heads.kinds.eagle1 import Eagle1Head, Eagle1Shape
from headstart.heads.kinds.eagle3 import Eagle3Head, Eagle3Shape
from headstart.heads.kinds.medusa import MedusaHead, MedusaShape
from headstart.heads.kinds.peagle import PEagleHead, PEagleShape
from headstart.heads.vocab import DraftVocab
from headstart.inference.core.request import EmittedTokens
from headstart.inference.drafters import cost_measurement
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.kernels.products import library
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

torch.set_num_threads(1)

TAPS = (2, 3, 4)  # the default taps of 7 layers

ModelFactory = Callable[..., LlamaForCausalLM]
HeadFactory = Callable[..., Any]  # returns a head of the requested kind


@pytest.fixture(autouse=True, scope="module")
def _shapes_of_a_file() -> None:
    gc.freeze()  # earlier files' imports stay; else each collection at the end of a harvest goes through them
    shape_checks.check_first(10)


@pytest.fixture(autouse=True)
def _fixed_seed(request: pytest.FixtureRequest) -> None:
    """Seed torch, so that no test depends on those before it."""
    if request.config.option.markexpr != "not slow":
        shape_checks.check_first(2)
    # Without a GPU, torch.manual_seed notes the stack of each call for when one may be used.
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture
def as_in_production(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Users have no shape checks, which would refuse some wrong inputs before our code sees them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """typed(*words): run `headstart WORDS` in this process."""
    return lambda *words: type_command(words, monkeypatch, capsys)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what headstart caches for a user away from the user's own folder, but for its kernels: to compile them takes
    half a minute, and each run of a few tests did, and the commands that tests start."""
    folder = tmp_path_factory.mktemp("cache")
    if library() is not None:
        (folder / "products").symlink_to(user_cache("products").absolute())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADSTART_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def _sound_loops_and_short_waits() -> Iterator[None]:
    """Check every decode loop after each of its steps. Time few parts of a step. Let httpx read the certificates of all
    authorities once, and not for each client, 30 ms each: the tests need none of them.
    """
    step = DecodeLoop.step

    def checked(loop: DecodeLoop) -> list[EmittedTokens]:
        blocks = step(loop)
        assert_sound(loop)
        return blocks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeLoop, "step", checked)
        patch.setattr(cost_measurement, "SECONDS_ON_CPU", 1e-3)
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def make_model() -> ModelFactory:
    """make_model(seed=0, **config): a random Llama in float32; `config` overrides LlamaConfig."""

    def make(seed: int = 0, **config: Any) -> LlamaForCausalLM:
        sizes = {**SIZES, "num_hidden_layers": 7, "num_key_value_heads": 2, "initializer_range": 0.4}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).eval()

    return make


@pytest.fixture(scope="session")
def target(make_model: ModelFactory) -> TargetModel:
    """A target with 4 layers, grouped queries and no end token; shared between tests, so do not change it."""
    return TargetModel(make_model(num_hidden_layers=4), TAPS)


@pytest.fixture(scope="session")
def deep_target(make_model: ModelFactory) -> TargetModel:
    """The target that the heads are made for: 7 layers, the fewest with the default taps of every engine."""
    return TargetModel(make_model(num_hidden_layers=7), TAPS)


@pytest.fixture(scope="session")
def target_folder(deep_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The deep target on disk: config.json and one model.safetensors, untied embeddings, no tokenizer."""
    folder = tmp_path_factory.mktemp("target")
    deep_target.model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def frozen(target_folder: Path) -> FrozenTarget:
    """The embedding, final norm and lm_head of the deep target."""
    return FrozenTarget.from_folder(target_folder, torch.float32)


@pytest.fixture(scope="session")
def make_head(frozen: FrozenTarget) -> HeadFactory:
    """make_head(kind="eagle3", seed=1, vocab=None, **shape): a head of random weights; `shape` overrides its shape.

    No weight is zero, so all of them matter; norm weights are drawn around 1.
    """

    def make(kind: str = "eagle3", seed: int = 1, vocab: DraftVocab | None = None, **shape: Any) -> DraftHead:
        config = frozen.config
        vocab = vocab or DraftVocab.full(config.vocab_size)
        sizes: dict[str, Any] = {"hidden_size": config.hidden_size, "intermediate_size": 40, "num_heads": 4}
        sizes |= {"num_kv_heads": 2, "head_dim": 8}
        if kind == "medusa":
            medusa = MedusaShape(**{"hidden_size": config.hidden_size, "num_heads": 3, "num_layers": 1, **shape})
            head: DraftHead = MedusaHead(medusa, frozen, vocab)
        elif kind == "block":
            block = {"reaches": (Reach(), Reach()), "block_size": 4, "mask_token_id": 96, "taps": TAPS}
            head = BlockHead(BlockShape(**{**block, **sizes, **shape}), frozen, vocab)
        elif kind == "peagle":
            peagle = {**sizes, "taps": TAPS, "num_layers": 2, "mask_token_id": 96, "depths": 4, **shape}
            head = PEagleHead(PEagleShape(**peagle), frozen, vocab)
        elif kind == "eagle1":
            head = Eagle1Head(Eagle1Shape(**{**sizes, **shape}), frozen, vocab)
        else:
            head = Eagle3Head(Eagle3Shape(**{**sizes, "taps": TAPS, **shape}), frozen, vocab)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                is_norm = parameter.ndim == 1
                parameter.normal_(1.0 if is_norm else 0.0, 0.3, generator=generator)
        return head.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def head(make_head: HeadFactory) -> Eagle3Head:
    return make_head()


@pytest.fixture(scope="session")
def harvested(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run up to its features."""
    folder = tmp_path_factory.mktemp("harvested")
    build_run(folder)
    harvest(tiny_recipe(folder))
    return folder


@pytest.fixture
def log_every_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # a patch of its own, as some tests undo theirs
        patch.setattr("headstart.trainers.loop.LOG_EVERY", 1)
        yield


@pytest.fixture
def make_recipe(harvested: Path, tmp_path: Path, log_every_step: None) -> Callable[..., Recipe]:
    """make_recipe(name, *overrides): the recipe of a separate run that has features and no checkpoint."""

    def make(name: str, *overrides: str) -> Recipe:
        if not (tmp_path / name).exists():
            shutil.copytree(harvested / "run", tmp_path / name)
        return tiny_recipe(harvested, f"run_dir={tmp_path / name}", *overrides)

    return make


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    """OpenAI's own client of the module's `server`, which a fixture of that name starts."""
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found

"""Laws of servers: several write what one writes, and vLLM's states are our target's, or the wrong server is named.

The server of states does what vLLM's source says; tests/interop/check_vllm_states.py asks vLLM itself.
"""

import fcntl
import os
import random
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from completion_server import Server, serving
from safetensors.torch import save_file
from tiny_run import VOCAB_SIZE, assert_same_sample, build_target, contents, tiny_recipe
from torch import Tensor

from headstart.data_pipelines.features import vllm_states
from headstart.data_pipelines.features.shards import FeatureStore
from headstart.data_pipelines.harvest import harvest
from headstart.data_pipelines.prompts.completion_client import CompletionClient, completion
from headstart.inference.core.sampling import Sampling
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe
from headstart.recipes.schema import TargetSection


class Sampler(Server):
    """The response depends on all that a request says, as the target's does."""

    def response(self, body: dict[str, Any]) -> list[int]:
        draw = random.Random(f"{body['prompt']} {body['seed']} {body['temperature']}")
        return [draw.randrange(1, VOCAB_SIZE) for _ in range(draw.randint(3, body["max_tokens"]))]


@pytest.fixture(autouse=True)
def no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.data_pipelines.prompts.completion_client.RETRIES", 0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_three_servers_of_which_one_dies_write_the_texts_of_one(harvested, tmp_path, stack, capsys):
    alone, _ = stack.enter_context(serving(Sampler))
    wanted = tiny_recipe(harvested, f"run_dir={tmp_path / 'one'}", f"data.server={alone}", "data.online=[auto]")
    harvest(wanted)
    three = [stack.enter_context(serving(Sampler)) for _ in range(3)]
    (dying, dead), *others = three
    dead.dies_after = 2
    capsys.readouterr()
    servers = f"data.server=[{', '.join(url for url, _ in three)}]"
    run = f"run_dir={tmp_path / 'three'}", "data.generate_batch=2", "data.online=[auto]"
    found = tiny_recipe(harvested, servers, *run)
    harvest(found)
    assert contents(found.responses_dir) == contents(wanted.responses_dir)
    assert len(dead.seen) == 2
    assert all(handler.seen for _, handler in others)
    assert sum(len(handler.seen) for _, handler in three) == 16  # each sample was answered once
    assert capsys.readouterr().out.count(f"data.server: {dying}/v1/completions gave no answer") == 1


def test_a_request_goes_to_the_server_with_the_fewest_in_flight(stack: ExitStack) -> None:
    """The slow server answers nothing until the fast one has answered all the rest."""
    rest_is_done = threading.Event()

    def late(handler: Server, body: dict[str, Any]) -> list[int]:
        assert rest_is_done.wait(timeout=10)
        return [1]

    def at_once(handler: Server, body: dict[str, Any]) -> list[int]:
        if len(handler.seen) == 10:
            rest_is_done.set()
        return [1]

    (slow_url, slow), (fast_url, fast) = (stack.enter_context(serving(response=each)) for each in (late, at_once))
    client = CompletionClient([slow_url, fast_url])
    assert len(dict(client.each([completion([1, 2], Sampling(), 4)] * 12, 2))) == 12
    assert (len(slow.seen), len(fast.seen)) == (2, 10)


def test_when_all_servers_are_gone_each_is_named_and_finished_responses_are_kept(harvested, tmp_path, stack):
    two = [stack.enter_context(serving(Sampler, dies_after=3)) for _ in range(2)]
    run = f"run_dir={tmp_path}", "data.online=[auto]", "data.generate_batch=1"
    recipe = tiny_recipe(harvested, f"data.server=[{', '.join(url for url, _ in two)}]", *run)
    with pytest.raises(ValueError, match="run the command again; finished responses are kept") as error:
        harvest(recipe)
    assert all(f"{url}/v1/completions gave no answer" in str(error.value) for url, _ in two)
    url, handler = stack.enter_context(serving(Sampler))
    harvest(tiny_recipe(harvested, f"data.server={url}", *run))
    assert len(handler.seen) == 16 - 6


def test_a_server_of_another_model_is_refused_by_name(stack: ExitStack) -> None:
    right, wrong = (stack.enter_context(serving(model=model))[0] for model in ("tiny", "other"))
    with pytest.raises(ValueError, match=rf"{right} serves tiny, but {wrong} serves other; servers of one model"):
        CompletionClient([right, wrong])


TAPS, LAYERS = (1, 2, 3), 4
FEW = "data.num_prompts=5", "data.heldout_samples=1", "data.shard_samples=2"
Change = Callable[[dict[str, Tensor]], dict[str, Tensor] | None]


class Writer(Server):
    """Writes the states of each prompt, hidden states `layers`, into a file, after its answer; its lock is held until
    then. LAYERS + 1 stands for the last state after the final norm."""

    target: TargetModel
    folder: Path
    layers: tuple[int, ...] = (*TAPS, LAYERS)
    change: Change = dict
    alone = threading.Lock()

    def more(self, body: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        path = self.folder / f"cmpl-{uuid4().hex}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with self.alone, torch.inference_mode():
            tokens = torch.tensor([body["prompt"]])
            states, last_hidden = self.target.passes.hidden_states(tokens)
        if "logprobs" in body:
            best = self.target.frozen.logits(last_hidden[0, -1]).log_softmax(-1).max(-1)
            choice |= {"token_ids": [int(best.indices)], "logprobs": {"token_logprobs": [float(best.values)]}}
        every = [*states[:LAYERS], last_hidden, self.target.frozen.norm(last_hidden)]
        found = torch.cat([every[layer] for layer in self.layers]).transpose(0, 1).contiguous()
        content = type(self).change({"hidden_states": found, "token_ids": tokens[0]})

        def write() -> None:
            time.sleep(0.02)
            if content is not None:
                save_file(content, path)
            os.close(lock)

        threading.Thread(target=write).start()
        return {"kv_transfer_params": {"hidden_states_path": str(path)}}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    section = TargetSection(path=str(build_target(tmp_path_factory.mktemp("served"))), dtype="float32", device="cpu")
    return TargetModel.load(section, tuple(range(LAYERS + 1)), packed=False)


@pytest.fixture
def start(tmp_path: Path, target: TargetModel) -> Iterator[Callable[..., str]]:
    (tmp_path / "written").mkdir()
    with ExitStack() as stack:
        own = {"target": target, "folder": tmp_path / "written"}
        yield lambda **fields: stack.enter_context(serving(Writer, **own, **fields))[0]


@pytest.fixture
def with_states(harvested: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """with_states(*urls, name="run"): the recipe of a run that takes its states from these servers."""

    def recipe(*urls: str, name: str = "run") -> Recipe:
        servers = "data.states=vllm", f"data.server=[{', '.join(urls)}]"
        return tiny_recipe(harvested, f"run_dir={tmp_path / name}", *servers, *FEW)

    return recipe


def test_states_of_vllm_are_the_targets_and_its_files_are_removed(harvested, tmp_path, start, with_states, capsys):
    """Also if a server ends between two texts. Features of the target itself do not continue as vLLM's."""
    own = tiny_recipe(harvested, f"run_dir={tmp_path / 'own'}", f"data.server={start()}", *FEW)
    harvest(own)
    with pytest.raises(ValueError, match=r"data\.states: made with None, the recipe says 'vllm'"):
        harvest(with_states(start(), name="own"))
    for path in (tmp_path / "written").iterdir():  # of the responses' prompts
        path.unlink()
    recipe = with_states(dying := start(dies_after=8), start())
    harvest(recipe)
    assert capsys.readouterr().out.count(f"{dying}/v1/completions gave no answer") == 1
    assert contents(recipe.responses_dir).keys() == contents(own.responses_dir).keys()
    for split in ("train", "heldout"):
        mine, its = (FeatureStore(each.features_dir, split) for each in (own, recipe))
        assert len(mine) == len(its) > 0
        for number in range(len(mine)):
            assert_same_sample(its[number], mine[number])
    assert not list((tmp_path / "written").iterdir())


def test_without_a_server_the_command_that_starts_one_is_printed(harvested, tmp_path, with_states):
    none = tiny_recipe(harvested, f"run_dir={tmp_path}", "data.states=vllm")
    for recipe in (none, with_states("http://127.0.0.1:9")):
        with pytest.raises(ValueError, match=r"data\.server") as error:
            harvest(recipe)
        (line,) = (line for line in str(error.value).splitlines() if line.startswith("  vllm serve "))
        words = shlex.split(line)
        assert words[2] == str(harvested / "target")
        assert words[words.index("--max-model-len") + 1] == "37"
        assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]' in words[words.index("--speculative-config") + 1]


def test_texts_that_leave_no_room_for_the_token_that_vllm_writes_are_refused(harvested: Path, tmp_path: Path) -> None:
    values = "data.states=vllm", "data.server=http://x", "data.response_tokens=104"
    with pytest.raises(ValueError, match=r"^data\.response_tokens: 104 given, up to 103 is allowed with data\.states"):
        harvest(tiny_recipe(harvested, f"run_dir={tmp_path}", *values))


def reversing(name: str) -> Change:
    return lambda content: {**content, name: content[name].flip(-1)}


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"layers": (0, 1, 2, 4)}, ("1, 2, 3, 4 and wrote 0, 1, 2, 4", "started for other taps")),
        ({"layers": (0, 1, 2, 3)}, ("wrote 0, 1, 2, 3", "other taps, or numbers them in another way")),
        ({"layers": (1, 2, 3, 5)}, ("wrote 1, 2, 3, the last one after the final norm", "cannot be computed")),
        ({"change": reversing("hidden_states")}, ("differ from all of the target's", "serves another model")),
        ({"change": reversing("token_ids")}, ("other tokens than it was sent", "takes token ids as they are")),
        ({"change": lambda content: None}, ("cannot be read here", "shared_storage_path must be a folder")),
        ({"more": Server.more}, ("did not write hidden states", "is started by\n  vllm serve")),
    ],
)
def test_a_server_with_other_states_is_named_before_anything_is_written(tmp_path, start, with_states, fields, parts):
    """The right server beside it is not asked for a text either."""
    recipe, wrong = with_states(start(), url := start(**fields)), url
    with pytest.raises(ValueError, match=rf"^data\.states: {wrong} ") as error:
        harvest(recipe)
    assert all(part in str(error.value) for part in parts), error.value
    assert not list(recipe.features_dir.glob("*.safetensors"))
    assert not list(recipe.responses_dir.glob("*.jsonl*"))
    assert not list((tmp_path / "written").iterdir())


def test_of_a_target_too_large_to_load_the_last_state_is_checked(start, with_states, monkeypatch, capsys):
    monkeypatch.setattr(vllm_states, "free_memory", lambda device: 0)
    for last, cause in ((5, "it is after the final norm: training needs the last state before"), (2, "another state")):
        wrong = start(layers=(*TAPS, last))
        with pytest.raises(ValueError, match=rf"^data\.states: {wrong}: .* log-probability .* off .*{cause}"):
            harvest(with_states(start(), wrong))
    recipe = with_states(start())
    harvest(recipe)
    assert "too large to load here, so only vLLM's last state is checked" in capsys.readouterr().out
    assert len(FeatureStore(recipe.features_dir, "train")) == 5


def test_states_that_are_not_finite_are_refused_in_the_middle_and_whole_shards_are_kept(start, with_states):
    texts: list[int] = []

    def broken_late(content: dict[str, Tensor]) -> dict[str, Tensor]:
        texts.append(len(content["token_ids"]))
        if len(texts) == 6 + 3 + 5:  # the responses, the check, more than two shards of two
            content["hidden_states"][0, 0, 0] = torch.nan
        return content

    recipe = with_states(start(change=broken_late))
    with pytest.raises(ValueError, match="hidden states are not finite"):
        harvest(recipe)
    there = {path.name for path in recipe.features_dir.glob("*.safetensors")}
    assert 1 <= len(there) < 4
    harvest(recipe)
    assert len(FeatureStore(recipe.features_dir, "train")) == 5

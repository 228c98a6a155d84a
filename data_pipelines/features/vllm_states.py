"""Hidden states from vLLM (data.states: vllm): its servers write them to files, which move into the store.

From the source of vLLM 0.32: with the speculative method extract_hidden_states a server names, in its answer to a
completion, a safetensors file with `hidden_states` [tokens, layers, hidden] and `token_ids` of the prompt. Layers are
numbered like our taps, and L, the number of layers, stands for the last state before the final norm. The states of
each server are compared with the target's own.
"""

import json
import shlex
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headstart.common.process import user_cache
from headstart.common.remote import url_of
from headstart.data_pipelines.features.features import States
from headstart.data_pipelines.prompts.completion_client import Completion, CompletionClient, completion
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, folder_of, path_for_engines
from headstart.inference.core.cache_memory import free_memory
from headstart.inference.core.request import Images
from headstart.inference.core.sampling import Sampling
from headstart.inference.targets.loading import pick_device
from headstart.inference.targets.model import TargetModel
from headstart.recipes import Recipe

TOLERANCE = 0.2  # distance from the target's own state, relative to it: rounding, also of 8-bit weights, stays below
LOAD_MEMORY_FACTOR = 1.2  # memory to load the target's files, relative to their size
LOGPROB_TOLERANCE = 0.2  # between the server's log-probability and ours of its state: rounding stays below
NEEDED_BEFORE = "training needs the last state before the norm, which cannot be computed from the other"
AFTER_NORM = -1  # in place of a tap: the last hidden state after the final norm


def serve_command(recipe: Recipe, config: TargetConfig, taps: tuple[int, ...]) -> str:
    """The command that starts a server which writes the taps and the last hidden state."""
    layers = {"eagle_aux_hidden_state_layer_ids": [*taps, config.num_layers]}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    data = recipe.data_folder.absolute()  # of a URL a mirror, which holds what its store holds
    states = data / "vllm" if url_of(data) is None else user_cache("vllm").absolute()
    folder = {"shared_storage_path": str(states)}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    options = {
        "--revision": recipe.target.revision,
        "--dtype": recipe.target.dtype,
        "--max-model-len": str(recipe.data.longest_sample + 1),  # one token is written
        "--speculative-config": json.dumps({**method, "draft_model_config": {"hf_config": layers}}),
        "--kv-transfer-config": json.dumps({**connector, "kv_connector_extra_config": folder}),
    }
    words = [word for name, value in options.items() if value is not None for word in (name, value)]
    path = path_for_engines(recipe.target, folder_of(recipe.target))
    return shlex.join(["vllm", "serve", path, "--no-enable-prefix-caching", *words])


class VllmStates:
    """The servers of data.server as the source of a harvest's hidden states.

    Raises ValueError with the command that starts a server if there is none, and for states whose number, shape or
    format does not match the texts.
    """

    def __init__(self, recipe: Recipe, config: TargetConfig, taps: tuple[int, ...]) -> None:
        self.recipe, self.config, self.layers = recipe, config, (*taps, config.num_layers)
        self.advice = f"a server for these taps is started by\n  {serve_command(recipe, config, taps)}"
        if recipe.data.longest_sample >= config.max_positions:
            most = config.max_positions - recipe.data.prompt_tokens - 1
            allowed = f"up to {most} is allowed with data.states vllm, which writes a token after each text; lower it"
            origin = recipe.data.origin("response_tokens")
            raise ValueError(f"data.response_tokens: {recipe.data.response_tokens} {origin}, {allowed}")
        if recipe.data.server is None:
            needed = "data.server: null given, the URL of one vLLM server or more is needed with data.states vllm"
            raise ValueError(f"{needed}; {self.advice}\nthen give data.server=http://HOST:8000")
        try:
            self.client = CompletionClient(recipe.data.server)
        except ValueError as error:
            raise ValueError(f"{error}; {self.advice}") from error

    def tap(self, texts: list[list[int]], images: Sequence[Images | None] = ()) -> States:
        """The hidden states of each text, which the servers compute together; prompts with images never get here."""
        assert not any(images), images
        bodies = [completion(text, Sampling(), max_new_tokens=1) for text in texts]
        found = {
            number: self._moved(texts[number], answer)
            for number, answer in self.client.each(bodies, self.recipe.data.harvest_batch)
        }
        states = torch.cat([found[number] for number in range(len(texts))])  # [tokens, layers, hidden]
        return States(states[:, :-1].flatten(1), states[:, -1])

    def refuse_other_states(self, target: TargetModel, texts: list[list[int]]) -> None:
        """Raise ValueError, naming server and probable cause, unless every server's states are the target's own.

        `target` has all of its hidden states as taps.
        """
        for text in texts:
            with torch.inference_mode():
                taps, last_hidden = target.passes.hidden_states(torch.tensor([text], device=target.device))
            own_states = {tap: state[0] for tap, state in enumerate([*taps[: self.config.num_layers], last_hidden])}
            own_states[AFTER_NORM] = target.frozen.norm(last_hidden)[0]
            for answer, states in self._of_each_server(text):
                refuse_other_layers(answer.url, states, own_states, self.layers, self.advice)

    def refuse_other_last_state(self, frozen: FrozenTarget, texts: list[list[int]]) -> None:
        """Raise ValueError, naming the server, unless every server's next token is as likely as its last state says."""
        for text in texts:
            for answer, states in self._of_each_server(text):
                token, told = answer.choice["token_ids"][0], answer.choice["logprobs"]["token_logprobs"][0]
                logits_of = (frozen.logits(states[-1, -1]), frozen.unembed(states[-1, -1].to(frozen.lm_head.dtype)))
                away, if_after_norm = (abs(float(logits.log_softmax(-1)[token]) - told) for logits in logits_of)
                if away <= min(LOGPROB_TOLERANCE, if_after_norm):
                    continue
                cause = "it is another state, or the server has another model, revision or number format"
                if if_after_norm <= LOGPROB_TOLERANCE:
                    cause = f"it is after the final norm: {NEEDED_BEFORE}"
                differ = (
                    f"the target's lm_head gives its last state a log-probability that is {away:.2g} off the server's"
                )
                raise ValueError(f"data.states: {answer.url}: {differ}; {cause}; {self.advice}")

    def _of_each_server(self, text: list[int]) -> Iterator[tuple[Completion, Float[Tensor, "tokens layers hidden"]]]:
        body = {**completion(text, Sampling(), max_new_tokens=1), "logprobs": 1}
        for server in self.client.live:
            if (answer := self.client.ask(server, body)) is not None:
                yield answer, self._moved(text, answer)

    def _moved(self, text: list[int], answer: Completion) -> Float[Tensor, "tokens layers hidden"]:
        """The states of a text, whose file is removed."""
        if answer.states_path is None:
            raise ValueError(f"data.states: {answer.url} did not write hidden states; {self.advice}")
        try:
            with answer.written_states() as path:
                tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            wrote = f"data.states: {answer.url} wrote {answer.states_path}, which cannot be read here ({error})"
            raise ValueError(
                f"{wrote}; if the server has just ended, run the same command again; else its shared_storage_path must "
                "be a folder that this machine sees under the same name, with working flock, whose files this user may "
                "read and remove"
            ) from error
        tokens, states = tensors["token_ids"], tensors["hidden_states"]
        if tokens.tolist() != text:
            differ = f"data.states: {answer.url} wrote the states of {len(tokens)} other tokens than it was sent"
            raise ValueError(f"{differ} ({len(text)}); serve the target with vLLM, which takes token ids as they are")
        wanted = [len(text), len(self.layers), self.config.hidden_size], getattr(torch, self.recipe.target.dtype)
        if (list(states.shape), states.dtype) != wanted:
            shape = f"{list(states.shape)} in {states.dtype}, but {wanted[0]} in {wanted[1]} is needed"
            which = f"hidden states {list(self.layers)} of each token, in target.dtype"
            raise ValueError(f"data.states: {answer.url} wrote states of shape {shape} ({which}); {self.advice}")
        return states


def own_target(recipe: Recipe, config: TargetConfig) -> TargetModel | None:
    """The target with all of its hidden states, on a device with room for it; None if there is none."""
    folder = folder_of(recipe.target)
    needed = LOAD_MEMORY_FACTOR * sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for device in dict.fromkeys((pick_device(recipe.target.device), torch.device("cpu"))):
        if free_memory(device) >= needed:
            section = recipe.target.model_copy(update={"device": str(device), "split": None})
            return TargetModel.load(section, tuple(range(config.num_layers + 1)), packed=False)
    return None


def refuse_other_layers(
    url: str,
    states: Float[Tensor, "tokens layers hidden"],
    own: dict[int, Float[Tensor, "tokens hidden"]],
    wanted: tuple[int, ...],
    advice: str,
) -> None:
    """Raise ValueError, with the probable cause, unless the states are near to those of our own that are wanted."""
    away = [{tap: distance(states[:, place], state) for tap, state in own.items()} for place in range(len(wanted))]
    nearest = tuple(min(each, key=each.__getitem__) for each in away)
    furthest = max(each[tap] for each, tap in zip(away, nearest, strict=True))
    if nearest == wanted and furthest <= TOLERANCE:
        return
    written = ", ".join("the last one after the final norm" if tap == AFTER_NORM else str(tap) for tap in nearest)
    if furthest > TOLERANCE:
        description = f"states that differ from all of the target's, by up to {furthest:.0%}"
        cause = "it serves another model, revision or number format than target.path"
    elif AFTER_NORM in nearest:
        description, cause = written, NEEDED_BEFORE
    else:
        description, cause = written, "it was started for other taps, or numbers them in another way"
    asked = f"data.states: {url} was asked for the hidden states {', '.join(map(str, wanted))} and wrote {description}"
    raise ValueError(f"{asked}: {cause}; {advice}")


def distance(states: Float[Tensor, "tokens hidden"], own: Float[Tensor, "tokens hidden"]) -> float:
    """How far states are from our own, relative to them; the median of the tokens, as the first ones are often huge."""
    mine, its = own.float().cpu(), states.float()
    away: Tensor = (its - mine).norm(dim=-1) / mine.norm(dim=-1)
    return float(away.nan_to_num(nan=torch.inf).median())

"""Drafts for the rollouts of TRL's GRPOTrainer, by a head that stays fresh while the policy is trained.

    trainer = GRPOTrainer(...)
    trainer.add_callback(RefreshCallback(trainer, "HEAD", "runs/grpo/heads"))
    trainer.train()

Rollouts are what they would be without a head: their texts follow from the policy and the seed alone.
"""

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback

from headstart.common.errors import errors_as_messages, wrong_value
from headstart.common.files import remove
from headstart.heads.kinds.checkpoint import load_head_for, load_taps, stored_dtype
from headstart.heads.target_config import TargetConfig
from headstart.inference.core.request import DecodeStats
from headstart.inference.drafters.build import build_drafter, load_drafting_head
from headstart.inference.engine.speculation import SpeculationByLoad, speculation_for
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.targets.model import TargetModel
from headstart.recipes.schema import DecodeSection, TargetSection
from headstart.trainers.refresh.refresh import Refreshed, Rollout, ends_of, refresh, with_states
from headstart.trainers.refresh.versions import Versions

NICE = 15  # a process beside the trainer gives way to it


class RefreshCallback(TrainerCallback):
    """Lets a head draft the rollouts of a trainer, and refreshes it on them every `every` optimizer steps.

    Without vLLM the policy's `generate` becomes headstart's own, in the trainer's process. With a vLLM server that
    drafts with the head, new heads are sent to it. `out` is a folder of versions, which a later run goes on with;
    `tokens` is how many of the newest tokens of answers a refresh learns from. With `beside`, a process of low priority
    trains, and its head drafts from the first step after it has ended. A refresh that fails is reported, and the old
    head stays. `options` are those of `refresh`. Raises ValueError for a trainer whose generation takes no drafts.
    """

    def __init__(
        self,
        trainer: Any,
        head: str | Path,
        out: str | Path,
        *,
        every: int = 20,
        tokens: int = 100_000,
        beside: bool = False,
        decode: DecodeSection | None = None,
        **options: Any,
    ) -> None:
        refuse_trainer(trainer)
        self.trainer, self.head, self.versions = trainer, Path(head).expanduser(), Versions(Path(out).expanduser())
        self.every, self.tokens, self.beside, self.options = every, tokens, beside, {"decode": decode, **options}
        self.rollouts: deque[Rollout] = deque()
        self.inputs: object = None  # the trainer's, when they were looked at last
        self.process: subprocess.Popen[bytes] | None = None
        self.candidate, self.job, self.done = (self.versions.folder / "job" / name for name in ("head", "todo", "done"))
        self.sent: Path | None = self.head  # what a server drafts with
        self.model: Any = trainer.accelerator.unwrap_model(trainer.model)  # what the trainer calls `generate` of
        # Under a LoRA adapter, the model that has the adapter's layers.
        self.policy = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.drafting = Drafting(self.policy, lambda: self.newest, decode)
        load_head_for(self.newest, ends_of(self.policy))  # refuses a head of another target

    @property
    def newest(self) -> Path:
        """The head that drafts now."""
        return self.versions.served or self.head

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if not self.trainer.use_vllm:
            self.model.generate = lambda *given, **fields: self.generate(*given, **fields)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        vars(self.model).pop("generate", None)
        if self.process is not None:
            self.process.wait()
            self.attempt(self.take_from_process)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self.trainer.accelerator.is_main_process:
            return
        if (inputs := self.trainer._buffered_inputs) is not self.inputs:
            self.inputs = inputs
            self.keep(inputs)
        if self.process is not None and self.process.poll() is not None:
            self.attempt(self.take_from_process)
        if state.global_step % self.every == 0 and self.process is None and self.rollouts:
            self.attempt(self.start_process if self.beside else self.refresh_here)
        if self.trainer.use_vllm and self.sent != self.newest:
            self.attempt(self.send)

    def generate(self, *given: Any, **fields: Any) -> Tensor:
        texts = self.drafting.generate(*given, **fields)
        self.trainer._log_metric("acceptance_length", self.drafting.stats.acceptance_length)
        return texts

    def keep(self, inputs: list[dict[str, Tensor]]) -> None:
        """Add the rollouts of a generation, and drop the oldest of those that are too many."""
        for batch in inputs:
            written = batch["completion_mask"].bool() & batch.get("tool_mask", batch["completion_mask"]).bool()
            for row in range(len(written)):
                prompt = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
                is_text = batch["completion_mask"][row].bool()
                answer, mask = batch["completion_ids"][row][is_text].tolist(), written[row][is_text].tolist()
                if any(mask):
                    self.rollouts.append(Rollout(prompt + answer, [False] * len(prompt) + mask))
        while sum(sum(each.loss_mask) for each in self.rollouts) > self.tokens:
            self.rollouts.popleft()

    def attempt(self, work: Callable[[], None]) -> None:
        """Do some work; training goes on if it fails."""
        try:
            work()
        except Exception as error:  # TRL's client raises nothing more precise
            print(f"headstart: {type(error).__name__}: {error}; {self.newest} stays the head", flush=True)

    def refresh_here(self) -> None:
        remove(self.candidate)
        head = self.newest
        self.take(head, refresh(head, self.rollouts, self.policy, self.candidate, **self.options))

    def take(self, before: Path, refreshed: Refreshed) -> None:
        """Draft with a refreshed head if it is new, and note the verdict."""
        step = self.trainer.state.global_step
        print(f"headstart: step {step}: {refreshed.verdict}", flush=True)
        if refreshed.is_new:
            self.versions.choose(self.versions.add(refreshed.head).name)
        self.versions.note(step=step, **{"from": str(before)}, head=str(self.newest), **vars(refreshed.verdict))

    def start_process(self) -> None:
        head, target = self.newest, ends_of(self.policy)
        remove(self.job.parent)
        self.job.parent.mkdir(parents=True)
        rollouts = with_states(self.rollouts, load_head_for(head, target), self.policy)
        given = {"head": head, "rollouts": rollouts, "target": target, "out": self.candidate}
        torch.save(given | self.options, self.job)
        self.process = subprocess.Popen([sys.executable, "-m", "headstart.trl", str(self.job)])

    def take_from_process(self) -> None:
        self.process = None
        self.take(*torch.load(self.done, weights_only=False))  # there is none if the process failed, and said why

    def send(self) -> None:
        """Send the newest head to the drafts of a vLLM server, by the names in its published files."""
        client, folder = self.trainer.vllm_generation.vllm_client, self.newest
        head = load_head_for(folder, ends_of(self.policy)).to(getattr(torch, stored_dtype(folder)))
        tensors = {name: each.to(self.trainer.accelerator.device) for name, each in head.served_tensors().items()}
        about = [(name, str(each.dtype).removeprefix("torch."), list(each.shape)) for name, each in tensors.items()]
        client._post(f"{client.base_url}/start_draft_weight_update", json={})
        client._updating_weights = True  # else the client would begin a session for the policy
        try:
            client.update_named_params(about, iter(tensors.items()))
        finally:
            client._updating_weights = False
            client._post(f"{client.base_url}/finish_weight_update", json={})
        self.sent = folder


class Drafting:
    """headstart's `generate` of a policy in training, with drafts by its newest head."""

    def __init__(self, policy: PreTrainedModel, head: Callable[[], Path | None], decode: DecodeSection | None) -> None:
        """`head` gives a head's folder before each generation; None decodes without drafts."""
        self.policy, self.head, self.decode = policy, head, decode or DecodeSection()
        self.stats = DecodeStats()  # of the last generation
        self.target: TargetModel | None = None
        self.places: list[int] = []  # of the weights that `target` reads
        self.speculation: SpeculationByLoad | None = None

    def generate(self, input_ids: Tensor, attention_mask: Tensor, generation_config: Any, **fields: Any) -> Tensor:
        """As transformers' `generate`; the seed of each text follows from torch's global generator."""
        first = int(torch.randint(2**31, ()))
        seeds = [first + row for row in range(len(input_ids))]
        model, given = self.model(), {"attention_mask": attention_mask, "generation_config": generation_config}
        output = model.generate(input_ids, **given, **fields, seed=seeds, return_dict_in_generate=True)
        assert not isinstance(output, Tensor)
        self.stats = output.stats
        return output.sequences

    def model(self) -> SpeculativeModel:
        """The policy as it is now, with its newest head."""
        folder, places = self.head(), [weight.data_ptr() for weight in self.policy.parameters()]
        if self.target is None or places != self.places:
            config = TargetConfig.from_dict(self.policy.config.to_dict())
            taps = () if folder is None else load_taps(folder, config)
            self.target, self.places, self.speculation = TargetModel(view_of(self.policy), taps), places, None
        vars(self.target).pop("frozen", None)  # some families' norms are copied
        if folder is None:
            return SpeculativeModel(self.target, max_batch=self.decode.max_batch)
        source = TargetSection(path=str(folder), dtype="float32")  # only named, never read
        drafter = build_drafter(self.decode, self.target, source, load_drafting_head(folder, self.target))
        self.speculation = self.speculation or speculation_for(self.decode, self.target, drafter)
        return SpeculativeModel(self.target, drafter, None, self.decode.max_batch, self.speculation)


def view_of(policy: PreTrainedModel) -> PreTrainedModel:
    """A model with modules of its own, which a TargetModel may change, whose weights are the policy's own tensors."""
    shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in policy.parameters()}
    view = deepcopy(policy, shared)
    for name in ("generate", "forward", "_original_forward"):  # of a trainer
        vars(view).pop(name, None)
    return view


def refuse_trainer(trainer: Any) -> None:
    """Raise ValueError for a trainer without rollouts, or whose engine cannot take a head."""
    name, remedy = type(trainer).__name__, "give it a GRPOTrainer"
    if not all(hasattr(trainer, field) for field in ("_buffered_inputs", "use_vllm")):
        raise wrong_value("trainer", name, "one that generates, a GRPOTrainer, is", remedy)
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        remedy = "TRL starts its own vLLM without drafts: start one with drafts, or set use_vllm=False"
        raise wrong_value("vllm_mode", "colocate", "only server is", remedy)
    if not trainer.use_vllm and trainer.use_transformers_continuous_batching:
        remedy = "set it to False: headstart batches continuously itself"
        raise wrong_value("use_transformers_continuous_batching", True, "only False is", remedy)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        remedy = "save the weights now and then, and call headstart.refresh with that folder"
        raise wrong_value("trainer", f"{name} under FSDP or DeepSpeed", "only weights that are whole are", remedy)


def main(path: Path) -> None:
    """Do the refresh that `start_process` has written, and write its outcome next to it."""
    os.nice(NICE)
    job = torch.load(path, weights_only=False)  # this user's trainer wrote it
    torch.save((job["head"], refresh(**job)), path.with_name("done"))


if __name__ == "__main__":
    with errors_as_messages():
        main(Path(sys.argv[1]))

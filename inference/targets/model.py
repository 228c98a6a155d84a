"""Any Hugging Face causal LM as a target, unpatched: tree masks, cache and taps only use public interfaces."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from headstart.common.errors import wrong_value
from headstart.heads.frozen import FrozenTarget
from headstart.heads.target_config import TargetConfig, folder_of
from headstart.heads.target_ends import TargetEnds
from headstart.inference.core.request import ALL_OF_IT, Images, cut_at_end
from headstart.inference.core.sampling import Sampling
from headstart.inference.kernels import FastForm, fast_form, kernels_on_gpu, own_layers_of
from headstart.inference.targets.architecture import attention_code, decoder_layers, position_limit
from headstart.inference.targets.attention import own_attention_of, use_grouped_attention
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.check import (
    choose_method,
    choose_where_faster,
    difference_in_bits,
    difference_with_images,
    fuse_where_right,
)
from headstart.inference.targets.gguf import with_eight_bits
from headstart.inference.targets.loading import (
    MISSING_KERNELS,
    load_config,
    load_weights,
    no_bars_of_transformers,
    pick_device,
)
from headstart.inference.targets.passes import Passes
from headstart.inference.targets.ranks import Ranks, TensorParallel, refuse_split
from headstart.recipes.schema import TargetSection

Singleton = TypeVar("Singleton")
QUIET_BYTES_MAX = 10**9  # loading more weights takes long enough to say so


class TargetModel:
    """The target model. `taps` are indices into Hugging Face's hidden_states: tap i is the input of layer i."""

    def __init__(
        self,
        model: PreTrainedModel,
        taps: tuple[int, ...],
        ranks: Ranks | None = None,
        folder: Path | None = None,
    ) -> None:
        """The model was read from `folder`, if known; `grouped_attention` replaces transformers' sdpa in it."""
        use_grouped_attention(model)
        if model.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # except in captured steps: see `cudnn_attention`
        self.ranks = ranks or Ranks()
        self.model = model.eval().requires_grad_(False)
        self.device, self.dtype = model.device, model.dtype
        self.config = replace(TargetConfig.from_dict(model.config.to_dict()), folder=folder)
        self.taps = taps
        self.generation_config = model.generation_config or GenerationConfig()  # the checkpoint's own
        self.end_tokens, self.pad_token = end_tokens(model.generation_config, model.config), pad_token(model)
        self.position_limit = position_limit(model)
        self.is_spread = any(parameter.device != self.device for parameter in model.parameters())
        self.layers = [*decoder_layers(model)]
        self._refuse_unknown_taps()
        self._singletons: dict[type, object] = {}
        self.load_unpacked: Callable[[], TargetModel] | None = None  # if the weights are packed
        self.fast_form = FastForm()
        self.passes = Passes(self.model, self.config, taps, self.layers)
        if self.device.type != "meta":
            choose_method(self.passes)

    @classmethod
    @no_bars_of_transformers()
    def load(cls, section: TargetSection, taps: tuple[int, ...], packed: bool = True) -> "TargetModel":
        """Load from a local folder or the hub: safetensors only, and no remote code unless the section trusts it.

        With target.split tensor, every rank of a launch must call this. Unless `packed`, the model can be trained and
        saved.
        """
        folder: Path = folder_of(section)
        config = load_config(folder, section.trust_remote_code)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        if size > QUIET_BYTES_MAX and Ranks().rank == 0:
            print(f"loading {section.path}: {size / 1e9:.1f} GB", file=sys.stderr, flush=True)
        load = partial(
            load_weights,
            folder,
            dtype=getattr(torch, section.dtype),
            attn_implementation=attention_code(config),
            trust_remote_code=section.trust_remote_code,
        )
        if section.split == "tensor" and Ranks().count > 1:
            refuse_split(config.get_text_config(), Ranks().count)
            model = load(distributed_config=DistributedConfig(tp_plan="auto"))
            target = cls(model, taps, TensorParallel(), folder)
            # No rank has all weights.
            target.frozen = FrozenTarget.from_folder(folder, target.dtype, target.device)
        elif section.split == "layers":
            model = with_eight_bits(load(device_map="auto"), folder, remember=False)
            target = cls(model, taps, None, folder)
        else:
            device: Any = pick_device(section.device)  # transformers' own `to` is mistyped
            model = with_eight_bits(load(), folder, remember=packed and device.type == "cpu").to(device)
            target = cls(model, taps, None, folder)
            if packed:
                target.speed_up(partial(cls.load, section, (), packed=False), section.compile, section.exact)
        if packed and section.exact and (found := target.difference_in_bits) is not None:
            allowed = "a target and device on which a token has the same bits in every pass is"
            remedy = "leave it false, or choose another target or device (headstart doctor --bits names all operations)"
            raise wrong_value(
                "target.exact",
                f"true with a {target.config.model_type!r} model, in which {found} differ",
                allowed,
                remedy,
            )
        if target.device.type == "cuda" and MISSING_KERNELS.packages and target.ranks.rank == 0:
            packages = " ".join(sorted(MISSING_KERNELS.packages))
            print(
                f"{section.path}: some layers run on slow reference code; to get their kernels: pip install {packages}"
            )
        return target

    @classmethod
    def load_to_answer(cls, section: TargetSection, taps: tuple[int, ...], packed: bool = True) -> "TargetModel":
        """`load`, for texts that also end where the tokenizer or the chat template ends an answer."""
        target = cls.load(section, taps, packed)
        added = target.also_end_as(ChatTemplate.of(section))
        if added and target.ranks.rank == 0:
            print(f"{section.path}: {added}")
        return target

    def also_end_as(self, template: ChatTemplate) -> str | None:
        """Add the end tokens of the tokenizer and its chat template; returns a line about new ones."""
        ends = template.end_tokens(self.end_tokens)
        new = [token for token in ends if token < self.config.vocab_size and token not in self.end_tokens]
        if not new:
            return None
        self.end_tokens = [*self.end_tokens, *new]
        names = " and ".join(map(repr, template.tokenizer.convert_ids_to_tokens(new)))
        return f"texts also end at {names}, an end token of its tokenizer or chat template, not of its configuration"

    def speed_up(self, load_unpacked: "Callable[[], TargetModel]", compiles: bool = False, exact: bool = False) -> None:
        """Decode with the fastest form of the layers; `load_unpacked` loads the same target as transformers does.

        If it `compiles`, packed layers are compiled in the background. On a GPU, `exact` chooses kernels that give a
        token the same bits in every pass.
        """
        if self.device.type == "cpu":
            assert self.frozen is not None  # made while the lm_head still has its own weights
        self.fast_form = fast_form(self.model, self.layers, compiles, exact)
        if self.device.type == "cuda" and not exact:
            self.fuse_small_operations()
        self.passes.by_position = self.fast_form.by_position
        self.load_unpacked = load_unpacked if self.fast_form.is_packed else None

    def fuse_small_operations(self) -> None:
        """On a GPU, let our kernels compute what lies between matrix products, products of few tokens, and choices of
        tokens; lines say which of them are on or off, and why."""
        lines, off = [], {"all": "there is no Triton: pip install triton"}
        if find_spec("triton") is not None:
            self.fast_form.fused, off = fuse_where_right(self.passes)
            few_rows = kernels_on_gpu("few_rows")
            products, choices, starts = (few_rows.Trials() for _ in range(3))
            lines = [f"own kernel for products of up to 8 tokens: {few_rows.choose_products(self.model, products)}"]
            self.fast_form.lm_head, found = choose_where_faster(self.passes, choices)
            lines += [f"own kernels for choices without logits: {found}"]
            found = kernels_on_gpu("fused").start_early_if_faster(self.device, self.passes.dtype, starts)
            lines += [f"own kernels that start before the last one has ended: {found}"]
            self.fast_form.products = products.times | choices.times | starts.times
        lines += [f"own kernels off, transformers' code runs: {kind} ({why})" for kind, why in off.items()]
        for line in lines if self.ranks.rank == 0 else ():
            print(line, file=sys.stderr, flush=True)

    @cached_property
    def unpacked(self) -> "TargetModel":
        """This target as transformers runs it, for baselines: itself, or another copy if its weights are packed."""
        return self if self.load_unpacked is None else self.load_unpacked()

    @cached_property
    def difference_in_bits(self) -> str | None:
        """The first operation whose bits depend on what else a pass computes; None if a token's logits never do."""
        return difference_in_bits(self.passes)

    def refuse_images(self, prompt: list[int], images: Images) -> None:
        """Raise ValueError if the target cannot decode after images; prompts are trials until one passes."""
        passes = self.passes
        why: str | None = None if passes.reads_images else "which has no image tower"
        if why is None and not passes.decodes_after_images:  # a failure may be the prompt's own
            why = difference_with_images(passes, prompt, images)
            passes.decodes_after_images = why is None
        if why:
            allowed = "text, or a target that decodes after images as its own forward computes, is"
            raise wrong_value("images", f"with a {self.config.model_type!r} target, {why}", allowed, ALL_OF_IT)

    @property
    def may_capture(self) -> bool:
        """Whether decoding captures its steps as CUDA graphs, by default."""
        able = self.device.type == "cuda" and self.passes.verifies_trees
        return able and self.ranks.may_capture and not self.is_spread

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that the model supports and computes the same in one pass and in several."""
        known = self.config.max_positions
        return known if self.position_limit is None else min(known, self.position_limit)

    def singleton(self, kind: type[Singleton]) -> Singleton:
        """The target's only instance of this class, made on first use. Other modules keep per-target state in it."""
        return cast(Singleton, self._singletons.setdefault(kind, kind()))

    @cached_property
    def frozen(self) -> FrozenTarget:
        """The embedding, final norm and lm_head, shared with the heads; copies of those that are on other devices."""
        return FrozenTarget.from_model(self.model, TargetEnds.from_class(self.model), self.config, self.device)

    def tap_columns(self, taps: tuple[int, ...]) -> Int[Tensor, " tapped"] | None:
        """The columns of `TargetOutput.taps` that a drafter reads; None if it reads all of them or none.

        Raises ValueError for a tap that the target does not give.
        """
        if taps in ((), self.taps):
            return None
        if not set(taps) <= set(self.taps):
            raise ValueError(
                f"the drafter reads the hidden states (taps) {list(taps)}, but the target was loaded with taps "
                f"{list(self.taps)}, and only those are allowed; load it with TargetModel.load(section, head.taps), or "
                f"both with SpeculativeModel.from_folders(TARGET, HEAD)"
            )
        starts = torch.tensor([self.taps.index(tap) for tap in taps]) * self.config.hidden_size
        return (starts[:, None] + torch.arange(self.config.hidden_size)).flatten().to(self.device)

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling | None = None,
        prompt_lookup: int | None = None,
        assistant: "tuple[TargetModel, int] | None" = None,
        streamer: Any = None,
        images: Images | None = None,
    ) -> list[list[int]]:
        """Continue each prompt with transformers' own `generate`: the baseline. Returns the new tokens without padding.

        Prompts are padded on the left. One random stream, started from the seed, serves the whole batch.
        `prompt_lookup` is the number of tokens to draft from the prompt, `assistant` a draft model and its number of
        tokens. Both, a streamer and `images` need a single prompt.
        """
        if self.unpacked is not self:
            return self.unpacked.generate(prompts, max_new_tokens, sampling, prompt_lookup, assistant, streamer, images)
        longest = max(map(len, prompts))
        pad = self.end_tokens[0] if self.end_tokens else 0
        tokens = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        sampling = sampling or Sampling()
        config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=self.end_tokens or None,
            prompt_lookup_num_tokens=prompt_lookup,
            **generation_fields(sampling),
        )
        extra: dict[str, Any] = {} if streamer is None else {"streamer": streamer}
        if images is not None:
            extra |= images.over_text(prompts[0]).arguments(self.device, self.dtype)
            tokens = extra.pop("input_ids", tokens)
        # transformers' `generate` falls back to a model's own settings: a checkpoint's top_p must not apply here.
        fallbacks = [(self.model, GenerationConfig())]
        if assistant is not None:
            model, count = assistant[0].unpacked.model, assistant[1]
            # Always this many tokens, however confident the assistant is.
            always = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0}
            fallbacks.append((model, GenerationConfig(num_assistant_tokens=count, **always)))
            extra["assistant_model"] = model
        with (
            own_attention_of(self.model),
            own_layers_of(self.model),
            with_fallbacks(fallbacks),
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
        ):
            torch.manual_seed(sampling.seed)
            written = self.model.generate(tokens, attention_mask=mask, generation_config=config, **extra)
        self.passes.hidden.clear()
        self.passes.take_offset()  # it is not of the texts that follow
        return [cut_at_end(row[longest:], self.end_tokens) for row in written.tolist()]

    def _refuse_unknown_taps(self) -> None:
        if self.taps and len(self.layers) < self.config.num_layers:
            raise ValueError(
                f"target.path: a {self.config.model_type!r} model given, which has {len(self.layers)} decoder layers "
                f"for the {self.config.num_layers} of its config.json, so a tap does not name one hidden state; models "
                f"that run each layer once are allowed: choose another target, or a drafter without a head"
            )
        if self.taps and (max(self.taps) > self.config.num_layers or min(self.taps) < 0):
            raise ValueError(
                f"head.taps: {list(self.taps)} given, the target's hidden_states 0 to {self.config.num_layers} are "
                f"allowed; leave head.taps out for {list(self.config.default_taps())}"
            )


@contextmanager
def with_fallbacks(configs: list[tuple[PreTrainedModel, GenerationConfig]]) -> Iterator[None]:
    """Within this context models have these generation configs instead of their own."""
    before = [(model, model.generation_config) for model, _ in configs]
    try:
        for model, config in configs:
            model.generation_config = config
        yield
    finally:
        for model, config in before:
            model.generation_config = config


def end_tokens(generation: GenerationConfig | None, config: PreTrainedConfig) -> list[int]:
    """Every token that ends a text, by a model's generation config or config."""
    ends = generation.eos_token_id if generation is not None else None
    ends = config.get_text_config().eos_token_id if ends is None else ends
    return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)


def ends_of_answers(section: TargetSection) -> list[int]:
    """The end tokens of `TargetModel.load_to_answer`, without loading the target."""
    folder: Path = folder_of(section)
    own = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    ends = end_tokens(own, load_config(folder, section.trust_remote_code))
    return [*ends, *ChatTemplate.of(section).end_tokens(ends)]


def pad_token(model: PreTrainedModel) -> int | None:
    """The token that pads shorter texts, by the model's generation config or config."""
    token = model.generation_config.pad_token_id if model.generation_config is not None else None
    return model.config.get_text_config().to_dict().get("pad_token_id") if token is None else token


def generation_fields(sampling: Sampling) -> dict[str, Any]:
    """The same sampling in transformers' fields, which has no other penalties and no bias by token."""
    assert sampling.presence_penalty == sampling.frequency_penalty == 0
    assert not sampling.logit_bias
    always = {"repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature == 0:
        return {**always, "do_sample": False}
    truncation = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p, "min_p": sampling.min_p or None}
    return {**always, **truncation, "do_sample": True, "temperature": sampling.temperature}

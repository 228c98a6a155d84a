"""The typed recipe: every setting of a run is one field here, with its unit, range and default."""

import os
import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

PYTHON_STDLIB = "python-stdlib"  # the data.prompts value that names the built-in corpus
SELF = "self"  # the data.prompts and data.heldout_prompts value for prompts that the target writes itself
HUB_PREFIX = "hf:"  # data.prompts starts with it to name a Hugging Face hub dataset
LONGEST_NAME = 255  # bytes of a file's name, on every common file system


def refuse_unusable_path(path: object) -> object:
    """Raise ValueError for text that can name no file; a Path would take "" for the current folder."""
    if isinstance(path, str) and (not path.strip() or "\0" in path):
        raise ValueError("a path of one or more characters is allowed; change it, or write . for the current folder")
    if isinstance(path, str) and any(len(os.fsencode(name)) > LONGEST_NAME for name in path.split("/")):
        raise ValueError(f"a path with names of up to {LONGEST_NAME} bytes is allowed; choose another, shorter one")
    return path


# Sections are strict: a quoted "600" is not a number. YAML has neither tuples nor paths, so those types convert.
HomePath = Annotated[
    Path,
    Field(strict=False),
    BeforeValidator(refuse_unusable_path),
    AfterValidator(lambda path: Path(os.path.expanduser(path))),
]
HomeText = Annotated[str, BeforeValidator(refuse_unusable_path), AfterValidator(os.path.expanduser)]
Temperature = Annotated[float, Field(ge=0)]
Temperatures = Annotated[tuple[Temperature, ...], Field(strict=False, min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]
Dtype = Literal["float32", "bfloat16", "float16"]
DEVICE_NAME = re.compile(r"auto|cpu|(cuda|mps|xpu|hpu)(:\d+)?")


def refuse_unknown_device(name: str) -> str:
    """Raise ValueError for a name that is no device; whether this machine has it is checked when a run starts."""
    if DEVICE_NAME.fullmatch(name):
        return name
    advice = "did you mean cuda?" if name.partition(":")[0].lower() in ("gpu", "cuda", "nvidia") else "choose one"
    raise ValueError(
        f"auto, cpu, cuda, a numbered device such as cuda:1, or another kind of torch's (mps, xpu, hpu) is allowed; "
        f"{advice}"
    )


DeviceName = Annotated[str, AfterValidator(refuse_unknown_device)]
NodePath = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Batches = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, min_length=1)]
Devices = Annotated[tuple[DeviceName, ...], Field(strict=False, min_length=1)]
Paths = Annotated[tuple[NodePath, ...], Field(strict=False, min_length=1)]
SystemPrompt = Annotated[str, Field(min_length=1)]
SystemPrompts = Annotated[tuple[SystemPrompt | None, ...], Field(strict=False, min_length=1)]
Folders = Annotated[dict[Annotated[str, Field(min_length=1)], HomePath], Field(strict=False)]
Weights = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Objective = Literal["soft_cross_entropy", "reverse_kl", "total_variation", "log_acceptance", "blended_acceptance"]
DrafterKind = Literal["head", "draft_model", "early_exit", "prompt_lookup", "suffix", "lookahead"]
DrafterRow = Literal["draft_model", "early_exit", "prompt_lookup", "suffix", "lookahead"]
HeadRow = Literal["chain", "tree", "cost_aware", "repeats", "untrained"]
Baseline = Literal["plain", "generate", "generate_lookup", "generate_assisted", HeadRow, DrafterRow]
Baselines = Annotated[tuple[Baseline, ...], Field(strict=False, min_length=1)]


def refuse_repeats(values: tuple[object, ...]) -> tuple[object, ...]:
    """Raise ValueError for a value that is given twice, where each makes a row of its own."""
    if len(set(values)) < len(values):
        raise ValueError(f"a list without repeats is allowed; write {list(dict.fromkeys(values))}")
    return values


class Section(BaseModel):
    """Base of all sections: unknown keys fail, types are strict, and nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSection(Section):
    """The target model, whose output speculative decoding reproduces."""

    path: HomeText = Field(description="Local folder, .gguf file or hub name (org/name) of the target.")
    revision: str | None = Field(default=None, description="Hub branch, tag or commit; null is the default branch.")
    dtype: Dtype = Field(description="Number format of the target's weights and computation.")
    device: DeviceName = Field(
        default="auto", description="Torch device, such as cuda:1; auto is cuda if available, else cpu."
    )
    split: Literal["layers", "tensor"] | None = Field(
        default=None,
        description="How a target too large for one device is split. layers: over all devices of the process; tensor: "
        "every layer over all ranks of the launch, which compute each batch together; null is one device.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code shipped with the model.")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto", description="Attention code. auto: the fastest exact one; sdpa, eager: transformers' own."
    )
    compile: bool = Field(
        default=False,
        description="Compile target and head layers (torch.compile) for the fixed-shape decode steps that CUDA graphs "
        "replay; the first texts wait for compilation.",
    )


class DataSection(Section):
    """The prompts that the target answers, and how its answers become training features."""

    prompts: HomeText = Field(
        description="Prompts or conversations to train on: a .jsonl, .parquet or .txt file, a folder written by the "
        f"datasets library, {HUB_PREFIX}org/name:split, {PYTHON_STDLIB} (built in), or {SELF}: the target, a chat "
        "model, writes them itself (Magpie)."
    )
    heldout_prompts: HomePath = Field(
        description=f"File of prompts kept for measurements, never trained on; same formats. {SELF}: with data.prompts "
        f"{SELF}, the first data.heldout_samples that the target writes."
    )
    responses: Literal["target", "given"] = Field(
        default="target",
        description="target: train on the target's own answers, which gives the best acceptance; given: train on the "
        "conversations as they are.",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="Assistant turns of a given conversation that are trained on."
    )
    max_bad_fraction: float = Field(
        default=0.01, ge=0, le=1, description="Largest share of unusable rows before the run stops; all are reported."
    )
    folder: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of prompts, responses and features; recipes may share it; null is run_dir."
    )
    store: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of an existing feature store to train on; null harvests from the prompts."
    )
    num_prompts: int = Field(gt=0, description="Number of prompts to train on.")
    prompt_tokens: int = Field(
        default=1024, gt=0, description="Longest prompt, in tokens; data.long_prompts says what becomes of longer ones."
    )
    long_prompts: Literal["cut", "drop"] = Field(
        default="cut",
        description="What becomes of rows that are too long. cut: the prompt loses its beginning (given conversations "
        "cannot be cut and count as unusable); drop: the row is left out.",
    )
    self_prompt_tokens: int = Field(
        default=256, gt=0, description=f"Longest user turn that the target writes with data.prompts {SELF}, in tokens."
    )
    self_temperature: float = Field(
        default=1.0, ge=0.01, description=f"Sampling temperature of the user turns that data.prompts {SELF} writes."
    )
    self_top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=f"The user turns of data.prompts {SELF} are sampled from the likeliest tokens with this total "
        "probability.",
    )
    self_turns: int = Field(
        default=1,
        gt=0,
        le=16,
        description=f"Most user turns of a conversation that data.prompts {SELF} writes; 1 to this many are used in "
        "turn, with the target's own answers between them.",
    )
    self_system_prompts: SystemPrompts | None = Field(
        default=None,
        description=f"System prompts that steer the topics of data.prompts {SELF}, used in turn; null among them is "
        "none. The finished prompts do not hold them: they are rendered as a server renders a user without one.",
    )
    self_language: str | None = Field(
        default=None,
        min_length=2,
        description=f"Language that the user turns of data.prompts {SELF} must be in, as its ISO 639-1 code, such as "
        "en; null is any.",
    )
    response_tokens: int = Field(default=1024, gt=0, description="Longest response, in tokens.")
    temperatures: Temperatures = Field(
        default=(0.0, 0.7, 1.0), description="Sampling temperatures, used in turn for the responses; 0 is greedy."
    )
    generate_batch: int = Field(default=32, gt=0, description="Responses generated in one batch.")
    harvest_batch: int = Field(default=8, gt=0, description="Samples in one target forward of the harvest.")
    heldout_samples: int = Field(default=64, gt=0, description="Held-out samples for metrics, never trained on.")
    shard_samples: int = Field(default=256, gt=0, description="Samples per feature shard.")
    shuffle_shards: int | None = Field(
        default=None,
        gt=0,
        description="Shards shuffled together and read at a time; null is all of them.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8", "int8"] = Field(
        default="bfloat16", description="Format of stored features; float8 and int8 keep one scale per token and tap."
    )
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: store all features, then train; online: the target computes them during training.",
    )
    cache_gigabytes: float = Field(
        default=0.0,
        ge=0,
        description="Memory for features kept by data.mode online, per process and split, in 10^9 bytes.",
    )
    online_devices: Devices | None = Field(
        default=None,
        description="Devices for separate target processes with data.mode online, assigned to the training processes "
        "in turn, such as [cuda:4, cuda:5]; null runs the target in the training process.",
    )
    server: str | None = Field(
        default=None, description="URL of an OpenAI-compatible server whose target writes the responses; null is none."
    )
    server_retries: int = Field(default=5, ge=0, description="Retries of a failed request to data.server.")
    draft_head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of a head that speeds up writing the responses; null is none."
    )

    @field_validator("server")
    @classmethod
    def server_is_a_url(cls, server: str | None) -> str | None:
        if server is not None and not re.match(r"https?://[^/\s]", server):
            written = server.lstrip("/") or "HOST:PORT"
            raise ValueError(f"a URL that starts with http:// or https:// is allowed; write http://{written}")
        return server

    @field_validator("prompts")
    @classmethod
    def hub_names_are_whole(cls, prompts: str) -> str:
        if prompts.startswith(HUB_PREFIX) and not re.fullmatch(
            r"[\w.-]+(/[\w.-]+)?(:\w+)?", prompts[len(HUB_PREFIX) :]
        ):
            raise ValueError(f"{HUB_PREFIX}org/name:split is allowed for a dataset of the hub; correct the name")
        return prompts

    @model_validator(mode="after")
    def fields_agree(self) -> "DataSection":
        if self.responses == "given" and self.prompts in (PYTHON_STDLIB, SELF):
            raise ValueError(f"responses given needs conversations in prompts; {self.prompts} has none, so name a file")
        if self.holds_out_own_prompts and self.prompts != SELF:
            raise ValueError(f"heldout_prompts {SELF} needs prompts {SELF}; choose that, or name a file of prompts")
        unused = [name for name in ("self_system_prompts", "self_language") if getattr(self, name) is not None]
        if unused and self.prompts != SELF:
            raise ValueError(f"{unused[0]} is for prompts {SELF}; remove it, or choose prompts {SELF}")
        writers = ["server"] * (self.server is not None) + ["draft_head"] * (self.draft_head is not None)
        writers += ["responses given"] * (self.responses == "given")
        if len(writers) > 1:
            raise ValueError(f"one of server, draft_head and responses given is allowed; remove {writers[0]}")
        if self.mode == "online" and self.store is not None:
            raise ValueError("mode online computes its own features; remove store, or choose mode offline")
        if self.mode != "online" and self.online_devices is not None:
            raise ValueError("online_devices are for mode online; remove them, or choose mode online")
        return self

    @property
    def holds_out_own_prompts(self) -> bool:
        """Whether the held-out prompts are the target's own too."""
        return str(self.heldout_prompts) == SELF


DraftVocabSize = Annotated[
    int | None,
    Field(gt=0, description="Most frequent tokens that the head may draft; null is the whole vocabulary."),
]


class LayerSection(Section):
    """Sizes shared by the heads that are one decoder layer; null copies the target's size."""

    kind: str
    intermediate_size: int | None = Field(
        default=None, gt=0, description="Width of the MLP, in features; null is the target's."
    )
    num_heads: int | None = Field(default=None, gt=0, description="Attention heads; null is the target's.")
    num_kv_heads: int | None = Field(
        default=None, gt=0, description="Key and value heads, a divisor of num_heads; null is the target's."
    )

    @field_validator("num_kv_heads")
    @classmethod
    def kv_heads_divide_heads(cls, num_kv_heads: int | None, section: ValidationInfo) -> int | None:
        num_heads = section.data.get("num_heads")
        if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
            raise ValueError(f"a divisor of num_heads, {num_heads}, is allowed; change one of them")
        return num_kv_heads


class Eagle1Section(LayerSection):
    """An EAGLE-1 draft head (arXiv 2401.15077); train.unroll above 1 makes it HASS (2408.15766)."""

    kind: Literal["eagle1"] = Field(description="Architecture of the draft head.")


def refuse_unordered_taps(taps: tuple[int, ...]) -> tuple[int, ...]:
    """Raise ValueError for taps that repeat or do not ascend; heads read them in ascending order."""
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"ascending indices without repeats are allowed; write {sorted(set(taps))}")
    return taps


Taps = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(strict=False, min_length=1),
    AfterValidator(refuse_unordered_taps),
]


class Eagle3Section(LayerSection):
    """An EAGLE-3 draft head (arXiv 2503.01840)."""

    kind: Literal["eagle3"] = Field(description="Architecture of the draft head.")
    hidden_size: int | None = Field(
        default=None, gt=0, description="Width of the head; null is the target's. Another width gets its own embedding."
    )
    draft_vocab_size: DraftVocabSize = None
    taps: Taps | None = Field(
        default=None,
        description="Target hidden states that the head reads, by index (0 is the embedding); null is 2, L//2 and L-3 "
        "of L layers, for a block head five, spread from 2 to L-2.",
    )
    fc_norm: bool = Field(default=False, description="Normalise each tap before joining them (EAGLE-3.1).")
    norm_output: bool = Field(
        default=False, description="Feed the normalised feature to the next draft level (EAGLE-3.1)."
    )


class MedusaSection(Section):
    """Medusa heads (arXiv 2401.10774), or Hydra heads (2402.05109) with sequential."""

    kind: Literal["medusa"] = Field(description="Architecture of the draft head.")
    medusa_heads: int = Field(
        default=4, gt=0, le=32, description="Number of Medusa heads; head i predicts the token at depth i."
    )
    medusa_layers: int = Field(default=1, gt=0, le=32, description="Residual blocks per Medusa head.")
    sequential: bool = Field(
        default=False, description="Each Medusa head also reads the tokens drafted before its own (Hydra)."
    )
    lm_head_rank: int | None = Field(
        default=None,
        gt=0,
        description="All Medusa heads share the target's lm_head, each with a low-rank addition of this rank; null "
        "gives each its own lm_head.",
    )
    draft_vocab_size: DraftVocabSize = None


class BlockSection(LayerSection):
    """A block head, which drafts all levels in one pass: DSpark (arXiv 2607.05147) or, by its fields, DFlash
    (2602.06036) or JetSpec (2606.18394)."""

    kind: Literal["block"] = Field(description="Architecture of the draft head.")
    num_layers: int = Field(default=2, gt=0, le=16, description="Decoder layers of the block head.")
    block_size: int = Field(
        default=7, gt=1, le=64, description="Slots that a pass fills, the last token's included; it drafts no deeper."
    )
    sample_from_anchor: bool = Field(
        default=True,
        description="true: every slot predicts the token after its own position, so block_size levels are drafted "
        "(DSpark). false: every slot but the first predicts the token at its own position, one level fewer (DFlash).",
    )
    causal: bool = Field(
        default=False, description="A slot sees only the slots before it in its block (JetSpec); false is all of them."
    )
    window: int | None = Field(
        default=None, gt=0, description="Positions before the block that it sees (sliding attention); null is all."
    )
    markov_rank: int = Field(
        default=256,
        ge=0,
        description="Rank of the Markov head, which adds to a slot's scores what the token before it says (DSpark); 0 "
        "is none (DFlash).",
    )
    markov_gate: bool = Field(
        default=False, description="The slot's hidden state gates what the token before it says (gated Markov head)."
    )
    confidence: bool = Field(
        default=False,
        description="Also train a confidence head, which serving engines read; headstart itself calibrates scores.",
    )
    draft_vocab_size: DraftVocabSize = None
    mask_token_id: int | None = Field(
        default=None, ge=0, description="Token that marks a slot to fill, best an unused one; null is the last."
    )
    taps: Taps | None = Field(
        default=None,
        description="Target hidden states that the head reads, by index (0 is the embedding); null is five, spread "
        "from 2 to L-2 of L layers.",
    )

    @model_validator(mode="after")
    def the_gate_has_a_markov_head(self) -> "BlockSection":
        if self.markov_gate and self.markov_rank == 0:
            raise ValueError("markov_gate true needs markov_rank above 0; raise it, or remove markov_gate")
        return self

    @property
    def levels(self) -> int:
        """How many levels one pass drafts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


HeadSection = Annotated[Eagle1Section | Eagle3Section | MedusaSection | BlockSection, Field(discriminator="kind")]


class TrainSection(Section):
    """How the head is trained on the features."""

    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(default=8, gt=0, description="Samples per optimizer step, over all processes.")
    accumulate: int = Field(
        default=1, gt=0, description="Micro-batches per optimizer step and process; more of them need less memory."
    )
    precision: Dtype = Field(
        default="float32", description="Number format of the head's computation; weights and losses stay in float32."
    )
    pack_tokens: int | None = Field(
        default=None, gt=0, description="Pack a step's samples into rows of up to this many tokens; null pads each."
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="AdamW's peak learning rate.")
    warmup_steps: int = Field(default=100, ge=0, description="Steps in which the learning rate rises from zero.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine",
        description="Learning rate after warm-up: cosine and linear fall to zero, constant stays at the peak.",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="adamw updates all weights; muon the layer's matrices, with AdamW for the rest."
    )
    muon_learning_rate: float = Field(default=0.02, gt=0, description="Muon's peak learning rate.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Decoupled weight decay, multiplied by the learning rate."
    )
    betas: Betas = Field(
        default=(0.9, 0.95), description="AdamW's decay per step of the gradient's mean and mean square."
    )
    clip_norm: float = Field(
        default=0.5, gt=0, description="Largest gradient norm; larger gradients are scaled down to it."
    )
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay per step of an exponential moving average of the weights, which is then measured and "
        "exported; null is no average.",
    )
    unroll: int = Field(
        default=7,
        gt=0,
        le=32,
        description="Depths trained by unrolling the head on its own output (training-time test).",
    )
    unroll_decay: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Loss weight of each unroll step, relative to the step before; null is 0.8, for block heads 0.78 "
        "to 0.87 by their size (DFlash).",
    )
    unroll_weights: Weights | None = Field(
        default=None, description="Loss weight of each unroll step; null uses unroll_decay."
    )
    depth_weights: Literal["decay", "d_pace"] = Field(
        default="decay",
        description="Loss weights of the depths. decay: unroll_weights or unroll_decay; d_pace: what each depth adds "
        "to the accepted length, given how likely the head makes the text before it (arXiv 2605.18810).",
    )
    objective: Objective | None = Field(
        default=None,
        description="Loss between the head's and the target's distributions; log_ and blended_acceptance are the LK "
        "losses; null is total_variation for block heads with a Markov head, soft_cross_entropy for others.",
    )
    objective_weight: float | None = Field(
        default=None,
        gt=0,
        description="Weight of the objective; null is 0.1 for eagle1, 1.8 for block heads with a Markov head (DSpark), "
        "1 for others.",
    )
    text_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the cross-entropy to the tokens of the text; null is 0.1 for block heads with a Markov "
        "head (DSpark), 1 without the objective for those without one that are not causal (DFlash), 0 for others.",
    )
    confidence_weight: float = Field(
        default=1.0, ge=0, description="Weight of the loss of a block head's confidence head."
    )
    anchors: int = Field(
        default=512, gt=0, description="Blocks per sample and step that a block head is trained on, drawn at random."
    )
    regression_weight: float | None = Field(
        default=None, ge=0, description="Weight of the smooth-L1 loss to the features; null is 1 for eagle1, else 0."
    )
    input_noise: float | None = Field(
        default=None, ge=0, description="Width of uniform noise, times 512 / tokens; null is 0.2 for eagle1, else 0."
    )
    start_from: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None,
        description="Folder of a trained head, ours or converted, whose weights and draft vocabulary training starts "
        "from; null starts a new head.",
    )
    fitted_start: bool = Field(
        default=False,
        description="Start an EAGLE-3 head as the linear map, fitted by least squares, that predicts the target's next "
        "state; false starts at random.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Save memory by recomputing unroll steps in the backward pass."
    )
    checkpoint_every: int = Field(default=500, gt=0, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=2, gt=0, description="Number of newest checkpoints kept.")
    eval_every: int = Field(default=500, gt=0, description="Steps between measurements on held-out data.")
    eval_prompts: int = Field(
        default=8, ge=0, description="Held-out prompts decoded at each measurement; 0 decodes none."
    )
    export: Literal["newest", "best"] = Field(
        default="newest",
        description="Weights to export: the newest, or the best by measured acceptance length (mean of temperatures 0 "
        "and 1).",
    )
    log_every: int = Field(default=10, gt=0, description="Steps between logged metrics.")
    dry_run: bool = Field(
        default=False, description="Print the run's sizes, memory, disk space and steps, then exit without running it."
    )

    @field_validator("export")
    @classmethod
    def best_is_measured(cls, export: str, section: ValidationInfo) -> str:
        if export == "best" and section.data.get("eval_prompts") == 0:
            raise ValueError(
                "only newest is allowed while train.eval_prompts is 0; choose newest, or raise train.eval_prompts"
            )
        return export

    @field_validator("fitted_start")
    @classmethod
    def one_start(cls, fitted: bool, section: ValidationInfo) -> bool:
        if fitted and section.data.get("start_from") is not None:
            raise ValueError("only false is allowed with train.start_from; remove one of them")
        return fitted

    @field_validator("unroll_weights")
    @classmethod
    def one_weight_for_each_step(
        cls, weights: tuple[float, ...] | None, section: ValidationInfo
    ) -> tuple[float, ...] | None:
        unroll = section.data.get("unroll")
        if weights is not None and unroll is not None and len(weights) != unroll:
            raise ValueError(f"a list of {unroll} weights is allowed, one per unroll step; change it or train.unroll")
        if weights is not None and not any(weights):
            raise ValueError("a list with at least one weight above 0 is allowed; change one of them")
        return weights


class JointSection(Section):
    """Medusa-2: the target's layers train with the heads; its embedding, final norm and lm_head stay frozen."""

    mode: Literal["lora", "full"] | None = Field(
        default=None,
        description="Train the target's layers together with the Medusa heads: lora trains low-rank additions (needs "
        "peft), full trains all layer weights in float32; null trains the heads only.",
    )
    lora_rank: int = Field(default=32, gt=0, description="Rank of the low-rank additions with mode lora.")
    learning_rate: float = Field(default=1e-4, ge=0, description="AdamW's peak learning rate for the target.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps at the start that train the heads alone.")
    distill_weight: float = Field(
        default=1.0, ge=0, description="Weight of the KL divergence between the original and the tuned target."
    )


class DecodeSection(Section):
    """How draft tokens are chosen and how text is decoded."""

    drafter: DrafterKind = Field(
        default="head",
        description="Source of draft tokens. head: the trained head; draft_model: a smaller model; early_exit: the "
        "target's first layers; prompt_lookup: repeats of earlier text; suffix: repeats of a corpus; lookahead: the "
        "target's own parallel guesses.",
    )
    draft_model: HomeText | None = Field(
        default=None, description="Folder or hub name of a draft model; with another tokenizer it drafts a chain."
    )
    exit_layers: int | None = Field(
        default=None, gt=0, description="Target layers that early_exit runs; null is half of them."
    )
    ngram: int = Field(default=3, gt=0, description="Longest token sequence that prompt_lookup and suffix search for.")
    corpus: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="JSONL file of texts for suffix; rows hold tokens, or prompt and response."
    )
    growth: Literal["chain", "adaptive", "fixed", "searched", "searched_cost_aware", "dynamic", "cost_aware"] = Field(
        default="dynamic",
        description="Shape of the draft tree. chain: one token per level; adaptive: a chain whose length follows "
        "recent acceptance; fixed: the tree of decode.paths; searched: the fixed shape fitted to the head; dynamic: "
        "the likeliest nodes (EAGLE-2); cost_aware, searched_cost_aware: dynamic and searched, with depth and size "
        "chosen from the step times measured on this machine.",
    )
    depth: int = Field(
        default=5, gt=0, le=64, description="Levels drafted per target step; the most, if growth chooses the depth."
    )
    width: int = Field(
        default=4, gt=0, description="Nodes expanded per level of a dynamic tree, and children per node; a chain has 1."
    )
    nodes: int = Field(
        default=16, gt=0, description="Draft tokens per tree without its root; the most, if growth chooses the size."
    )
    repeats: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Draft tokens that are verified beside a head's tree because they followed the same words earlier "
        "in the text: the most per step. They cost almost nothing where a step waits for the target's weights, and no "
        "CUDA graph holds such a step.",
    )
    paths: Paths | None = Field(
        default=None,
        description="Nodes of a fixed tree, each as the child ranks on its path from the root: [[0], [1], [0, 0]].",
    )
    acceptance: Literal["seeded", "rejection", "typical"] = Field(
        default="seeded",
        description="Acceptance rule when sampling. seeded: exactly the text of plain decoding with this seed; "
        "rejection: the same distribution, by rejection sampling; typical: Medusa's rule, which is lossy.",
    )
    typical_epsilon: float = Field(
        default=0.09, gt=0, le=1, description="Typical acceptance: a draft token passes above this probability."
    )
    typical_delta: float = Field(
        default=0.3, gt=0, description="Typical acceptance: a draft token also passes above this times exp(-entropy)."
    )
    top_k: int | None = Field(default=None, gt=0, description="Sample from this many likeliest tokens; null is all.")
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample from the likeliest tokens with this total probability."
    )
    min_p: float = Field(default=0.0, ge=0, le=1, description="Drop tokens below this share of the top probability.")
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="Above 1, makes tokens of the prompt and output less likely; 1 is no penalty."
    )
    presence_penalty: float = Field(default=0.0, description="Subtracted once from the logit of a token in the output.")
    frequency_penalty: float = Field(
        default=0.0, description="Subtracted from a token's logit for each time it is in the output."
    )
    max_new_tokens: int = Field(default=512, gt=0, description="Longest output, in tokens.")
    max_batch: int = Field(default=16, gt=0, description="Sequences decoded together in one batch.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the Gumbel noise; the same seed samples the same text."
    )

    @field_validator("paths")
    @classmethod
    def paths_follow_their_parents(
        cls, paths: tuple[tuple[int, ...], ...] | None
    ) -> tuple[tuple[int, ...], ...] | None:
        known = {(), *(paths or ())}
        for path in paths or ():
            needed = [path[:-1], (*path[:-1], max(path[-1] - 1, 0))]
            if missing := [list(other) for other in needed if other not in known]:
                raise ValueError(
                    "the path of every node is allowed only with those of its parent and of the child before it; add "
                    f"{missing[0]} for {list(path)}"
                )
        return paths

    @model_validator(mode="after")
    def fields_agree(self) -> "DecodeSection":
        for kind, field in (("draft_model", "draft_model"), ("suffix", "corpus")):
            if self.drafter == kind and self.model_dump()[field] is None:
                raise ValueError(f"drafter {kind} needs {field}; give decode.{field}")
        if self.drafter != "head" and self.growth in ("adaptive", "cost_aware"):
            raise ValueError(
                f"growth {self.growth} needs a head's measured costs; {self.drafter} allows chain or dynamic"
            )
        if self.drafter != "head" and self.growth in ("searched", "searched_cost_aware"):
            raise ValueError(
                f"growth {self.growth} needs a tree fitted to a head; {self.drafter} allows chain or dynamic"
            )
        if self.drafter in ("prompt_lookup", "suffix", "lookahead") and self.growth == "fixed":
            raise ValueError(
                f"growth fixed needs ranked children at every node; {self.drafter} allows chain or dynamic"
            )
        if self.repeats and (self.drafter != "head" or self.acceptance != "seeded"):
            raise ValueError(
                f"repeats {self.repeats} needs drafter head and acceptance seeded; {self.drafter} with "
                f"{self.acceptance} is given; write repeats: 0"
            )
        if (self.growth == "fixed") != (self.paths is not None):
            raise ValueError("growth fixed and paths go together; give both or neither")
        if self.acceptance == "rejection" and self.growth not in ("chain", "fixed", "searched"):
            raise ValueError(
                f"acceptance rejection allows growth chain, fixed or searched; {self.growth} keeps or drops sampled "
                f"tokens by their values, which would bias the output"
            )
        return self


class ReportSection(Section):
    """What the report measures."""

    prompts: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None,
        description="JSONL file of prompts by category, such as Spec-Bench's (data/spec_bench/question.jsonl of "
        "github.com/hemingkexia/Spec-Bench); null is the held-out prompts.",
    )
    num_prompts: int = Field(
        default=80, gt=0, description="Prompts for each row, of each category in turn; several turns count once."
    )
    batches: Batches = Field(default=(1,), description="Batch sizes; every row is measured with each.")
    temperatures: Temperatures = Field(
        default=(0.0, 0.7), description="Sampling temperatures; every row is measured at each."
    )
    head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of the head to measure; null is the head of this run."
    )
    other_heads: Folders = Field(
        default={},
        description="More heads of this target to measure, {name: folder}; their rows carry the name. They draft as "
        "the recipe says, up to their own depth.",
    )
    warmup_prompts: int = Field(default=3, ge=0, description="Prompts decoded before timing starts.")
    threads: int | None = Field(
        default=None,
        gt=0,
        le=1024,
        description="CPU threads per worker; null shares torch's default among them.",
    )
    workers: int = Field(
        default=1,
        gt=0,
        description="Processes that share the prompts on a CPU, for targets too small to use all cores. One process "
        "decodes a prompt with every method.",
    )
    baselines: Baselines = Field(
        default=("generate", "plain", "untrained", "chain", "tree"),
        description="Rows of the table. plain: our plain decoding; generate, generate_lookup, generate_assisted: "
        "transformers' generate, alone, with prompt lookup, with the draft model; chain, tree, cost_aware: each "
        "head alone, as a chain, as the recipe says, with growth cost_aware; repeats: each head as the recipe says, "
        "with decode.repeats; untrained: a random head; others: the drafter of that name.",
    )

    @field_validator("batches", "temperatures", "baselines")
    @classmethod
    def each_has_its_own_row(cls, values: tuple[object, ...]) -> tuple[object, ...]:
        return refuse_repeats(values)

    @field_validator("workers")
    @classmethod
    def each_worker_has_a_prompt(cls, workers: int, section: ValidationInfo) -> int:
        most = section.data.get("num_prompts")
        if most is not None and workers > most:
            raise ValueError(
                f"1 to report.num_prompts, {most}, is allowed; write as many as the CPU has cores, or fewer"
            )
        return workers

    @field_validator("baselines")
    @classmethod
    def other_heads_have_rows(cls, baselines: tuple[str, ...], section: ValidationInfo) -> tuple[str, ...]:
        if section.data.get("other_heads") and {"chain", "tree", "cost_aware", "repeats"}.isdisjoint(baselines):
            raise ValueError(
                "a list with chain, tree, cost_aware or repeats is allowed with report.other_heads; add one of them"
            )
        return baselines


class ExportSection(Section):
    """How the head is exported for a serving engine."""

    format: Literal["native", "vllm", "sglang", "tensorrt_llm", "eagle", "speculators", "medusa"] = Field(
        default="vllm",
        description="Format of the export. vllm, sglang and tensorrt_llm read the same files; eagle and medusa are the "
        "layouts of the authors' code, speculators that of the library; native loads in headstart only.",
    )
    head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of the head to export; null is the head of this run."
    )
    folder: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder to write; null is RUN_DIR/export/FORMAT."
    )
    dtype: Dtype | None = Field(
        default=None, description="Number format of the exported weights; null keeps the head's."
    )
    overwrite: bool = Field(default=False, description="Replace an existing head in the folder or in push_to.")
    push_to: str | None = Field(
        default=None,
        min_length=1,
        description="Hub repository (org/name) to upload the folder to; null uploads nothing.",
    )


class LogSection(Section):
    """Where metrics are logged besides the terminal and metrics.jsonl."""

    wandb: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto",
        description="Weights & Biases mode; auto is online if WANDB_API_KEY or WANDB_MODE is set, else offline.",
    )
    project: str = Field(default="headstart", min_length=1, description="Weights & Biases project name.")


class Recipe(Section):
    """One run, from prompts to report. Its files are below run_dir; prompts, responses and features may be shared in
    data.folder."""

    run_dir: HomePath = Field(description="Folder for everything that the run writes.")
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of the prompts, responses, initial weights and batch order."
    )
    target: TargetSection
    data: DataSection
    head: HeadSection
    train: TrainSection
    joint: JointSection = JointSection()
    decode: DecodeSection = DecodeSection()
    report: ReportSection = ReportSection()
    export: ExportSection = ExportSection()
    log: LogSection = LogSection()

    @property
    def data_folder(self) -> Path:
        return self.data.folder or self.run_dir

    @property
    def prompts_dir(self) -> Path:
        return self.data_folder / "prompts"

    @property
    def responses_dir(self) -> Path:
        return self.data_folder / "responses"

    @property
    def features_dir(self) -> Path:
        return self.data_folder / "features"

    @property
    def checkpoints_dir(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def head_dir(self) -> Path:
        return self.run_dir / "head"

    @property
    def tuned_target_dir(self) -> Path:
        return self.run_dir / "target"

    @property
    def report_dir(self) -> Path:
        return self.run_dir / "report"

    @property
    def export_dir(self) -> Path:
        return self.run_dir / "export"

    @property
    def metrics_path(self) -> Path:
        return self.run_dir / "metrics.jsonl"

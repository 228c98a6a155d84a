"""The typed recipe: every knob of a run is one field here, with its unit, its range and its default."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

PYTHON_STDLIB = "python-stdlib"  # the one value of data.prompts that names a built-in corpus instead of a file
HUB_PREFIX = "hf:"  # what data.prompts begins with when it names a dataset of the Hugging Face hub

# Sections are strict (a quoted "600" is no number), but YAML knows neither tuples nor paths, so these two convert.
HomePath = Annotated[Path, Field(strict=False), AfterValidator(lambda path: Path(os.path.expanduser(path)))]
HomeText = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Temperature = Annotated[float, Field(ge=0)]
Temperatures = Annotated[tuple[Temperature, ...], Field(strict=False, min_length=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, Beta], Field(strict=False)]
Taps = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
NodePath = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Batches = Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(strict=False, min_length=1)]
Devices = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
Paths = Annotated[tuple[NodePath, ...], Field(strict=False, min_length=1)]
Folders = Annotated[dict[str, HomePath], Field(strict=False)]
Weights = Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(strict=False, min_length=1)]
Objective = Literal["soft_cross_entropy", "reverse_kl", "total_variation", "log_acceptance", "blended_acceptance"]
DrafterKind = Literal["head", "draft_model", "early_exit", "prompt_lookup", "suffix", "lookahead"]
Baseline = Literal[
    "plain",
    "generate",
    "generate_lookup",
    "generate_assisted",
    "chain",
    "tree",
    "untrained",
    "draft_model",
    "early_exit",
    "prompt_lookup",
    "suffix",
    "lookahead",
]
Baselines = Annotated[tuple[Baseline, ...], Field(strict=False, min_length=1)]


class Section(BaseModel):
    """What all sections share: unknown keys fail, values keep their type, nothing changes after loading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetSection(Section):
    """The big model, whose output speculative decoding reproduces."""

    path: HomeText = Field(description="Local folder, or hub name such as org/name.")
    revision: str | None = Field(default=None, description="Hub branch, tag or commit; null is the default branch.")
    dtype: Dtype = Field(description="Number format that the target computes in.")
    device: str = Field(
        default="auto", description="auto is cuda if there is one, else cpu; or a torch device, cuda:1."
    )
    device_map: Literal["auto"] | None = Field(
        default=None,
        description="auto spreads the layers over all devices of the process, for targets larger than one.",
    )
    tp_plan: Literal["auto"] | None = Field(
        default=None,
        description="auto splits every layer over all ranks of the launch, which compute each batch together (tensor "
        "parallel, by transformers' plan for the model).",
    )
    zero_stage: Literal[3] | None = Field(
        default=None,
        description="3 shares the weights out among all ranks of the launch, each with batches of its own; a layer is "
        "gathered when it computes (DeepSpeed's ZeRO).",
    )
    trust_remote_code: bool = Field(default=False, description="Run the model code that a hub repository ships.")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        default="auto", description="The target's attention code; auto is the fastest that computes it exactly."
    )
    compile: bool = Field(
        default=False,
        description="Compile the layers of target and head (torch.compile) for decode steps of fixed shapes, as CUDA "
        "graphs replay them; the first texts wait for it.",
    )

    @model_validator(mode="after")
    def spread_in_one_way(self) -> "TargetSection":
        ways = {"device_map": self.device_map, "tp_plan": self.tp_plan, "zero_stage": self.zero_stage}
        given = [way for way, value in ways.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"one of {', '.join(ways)} is allowed; remove {given[0]}")
        return self

    @property
    def spans_ranks(self) -> bool:
        """Whether the ranks of a launch hold one target together."""
        return self.tp_plan is not None or self.zero_stage is not None


class DataSection(Section):
    """Which prompts the target answers, and how its answers become training features."""

    prompts: HomeText = Field(
        description="Prompts or conversations to train on: a .jsonl, .parquet or .txt file, a folder that datasets "
        f"saved, {HUB_PREFIX}org/name:split, or the word {PYTHON_STDLIB}."
    )
    heldout_prompts: HomePath = Field(description="File of prompts that are never trained on, of the same kinds.")
    responses: Literal["target", "given"] = Field(
        default="target",
        description="target: the target answers each prompt, which is what decides acceptance; given: conversations "
        "as they are.",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="Which of the assistant's turns of a given conversation are trained on."
    )
    max_bad_fraction: float = Field(
        default=0.01, ge=0, le=1, description="Share of unusable rows up to which a run goes on; all are reported."
    )
    folder: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None,
        description="Folder of prompts, responses and features, which several recipes may share; null is run_dir.",
    )
    store: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None,
        description="Folder of features to train on as they are, such as a merged store; null is those of the prompts.",
    )
    num_prompts: int = Field(gt=0, description="Prompts to train on.")
    prompt_tokens: int = Field(default=1024, gt=0, description="Longest prompt, in tokens.")
    response_tokens: int = Field(default=1024, gt=0, description="Longest response that the target writes, in tokens.")
    temperatures: Temperatures = Field(
        default=(0.0, 0.7, 1.0), description="Response i is sampled at temperature i of these, in turn; 0 is greedy."
    )
    generate_batch: int = Field(default=32, gt=0, description="Responses written at once.")
    harvest_batch: int = Field(default=8, gt=0, description="Samples whose features are read in one target forward.")
    heldout_samples: int = Field(default=64, gt=0, description="Samples kept out of training for held-out metrics.")
    shard_samples: int = Field(default=512, gt=0, description="Samples per shard file of features.")
    shuffle_shards: int | None = Field(
        default=None,
        gt=0,
        description="Shards read from at a time, whose samples are shuffled together; null is all of them.",
    )
    dtype: Literal["float32", "bfloat16", "float16", "float8", "int8"] = Field(
        default="bfloat16",
        description="Number format of the stored features; float8 and int8 have a scale per token and tap.",
    )
    mode: Literal["offline", "online"] = Field(
        default="offline",
        description="offline: features are stored, then trained on; online: the target makes them as training goes.",
    )
    cache_gigabytes: float = Field(
        default=0.0,
        ge=0,
        description="Features that data.mode online keeps in memory, per rank and split, in 10^9 bytes.",
    )
    online_devices: Devices | None = Field(
        default=None,
        description="Devices of processes that run the target of data.mode online while the head trains, one for each "
        "rank in turn, such as [cuda:4, cuda:5]; null runs it in the training process.",
    )
    server: str | None = Field(
        default=None, description="URL of an OpenAI-compatible server of the target that writes the responses."
    )
    server_retries: int = Field(default=5, ge=0, description="Further tries of a request that the server fails.")
    draft_head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of a head with which the responses are written sooner; null is none."
    )

    @model_validator(mode="after")
    def fields_agree(self) -> "DataSection":
        if self.responses == "given" and self.prompts == PYTHON_STDLIB:
            raise ValueError(f"responses given needs conversations in prompts, {PYTHON_STDLIB} has none; name a file")
        writers = ["server"] * (self.server is not None) + ["draft_head"] * (self.draft_head is not None)
        writers += ["responses given"] * (self.responses == "given")
        if len(writers) > 1:
            raise ValueError(f"one of server, draft_head and responses given is allowed; remove {writers[0]}")
        if self.mode == "online" and self.store is not None:
            raise ValueError("mode online makes its features itself; remove store, or choose mode offline")
        if self.mode != "online" and self.online_devices is not None:
            raise ValueError("online_devices are for mode online; remove them, or choose it")
        return self


class LayerSection(Section):
    """The sizes that all draft heads of one decoder layer have; null is the target's own."""

    kind: str
    intermediate_size: int | None = Field(default=None, gt=0, description="Width of the head's MLP, in features.")
    num_heads: int | None = Field(default=None, gt=0, description="Attention heads.")
    num_kv_heads: int | None = Field(default=None, gt=0, description="Key and value heads, a divisor of num_heads.")

    @field_validator("num_kv_heads")
    @classmethod
    def kv_heads_divide_heads(cls, num_kv_heads: int | None, section: ValidationInfo) -> int | None:
        num_heads = section.data.get("num_heads")
        if num_heads is not None and num_kv_heads is not None and num_heads % num_kv_heads:
            raise ValueError(f"a divisor of num_heads, {num_heads}, is allowed; change either of them")
        return num_kv_heads


class Eagle1Section(LayerSection):
    """An EAGLE-1 draft head (arXiv 2401.15077); train.unroll above 1 makes it HASS (2408.15766)."""

    kind: Literal["eagle1"] = Field(description="Architecture of the draft head.")


class Eagle3Section(LayerSection):
    """An EAGLE-3 draft head (arXiv 2503.01840)."""

    kind: Literal["eagle3"] = Field(description="Architecture of the draft head.")
    hidden_size: int | None = Field(
        default=None, gt=0, description="Width of the head, in features; another than the target's adds an embedding."
    )
    draft_vocab_size: int | None = Field(
        default=None, gt=0, description="Most frequent tokens that the head may draft; null is the whole vocabulary."
    )
    taps: Taps | None = Field(
        default=None,
        description="Target hidden_states indices that the head reads (i enters layer i); null is 2, L//2, L-3.",
    )
    fc_norm: bool = Field(default=False, description="Normalise each tap before they are joined (EAGLE-3.1).")
    norm_output: bool = Field(default=False, description="Feed the normalised feature to the next step (EAGLE-3.1).")

    @field_validator("taps")
    @classmethod
    def taps_ascend(cls, taps: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if taps is not None and list(taps) != sorted(set(taps)):
            raise ValueError(f"ascending indices, each once, are allowed; write {sorted(set(taps))}")
        return taps


class MedusaSection(Section):
    """Medusa heads (arXiv 2401.10774), or Hydra's (2402.05109) when they are sequential."""

    kind: Literal["medusa"] = Field(description="Architecture of the draft head.")
    medusa_heads: int = Field(default=4, gt=0, le=32, description="Tokens guessed ahead, a head for each.")
    medusa_layers: int = Field(default=1, gt=0, description="Residual blocks of each head.")
    sequential: bool = Field(
        default=False, description="Each head also reads the tokens that were drafted before its own (Hydra)."
    )
    lm_head_rank: int | None = Field(
        default=None,
        gt=0,
        description="All heads share the target's lm_head, and each adds a linear layer of this rank; null is an "
        "lm_head of its own for each.",
    )
    draft_vocab_size: int | None = Field(
        default=None, gt=0, description="Most frequent tokens that the head may draft; null is the whole vocabulary."
    )


HeadSection = Annotated[Eagle1Section | Eagle3Section | MedusaSection, Field(discriminator="kind")]


class TrainSection(Section):
    """How the head is fitted to the stored features."""

    steps: int = Field(gt=0, description="Optimizer steps.")
    batch_size: int = Field(default=8, gt=0, description="Sequences per optimizer step, all ranks together.")
    accumulate: int = Field(
        default=1, gt=0, description="Pieces that each rank cuts its share of a batch into; more take less memory."
    )
    precision: Dtype = Field(
        default="float32", description="Number format that the head computes in; weights and losses stay in float32."
    )
    pack_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Samples of a step share rows of at most so many tokens, a longer one has its own; null pads each.",
    )
    learning_rate: float = Field(default=1e-4, gt=0, description="AdamW's peak learning rate, per step.")
    warmup_steps: int = Field(default=100, ge=0, description="Steps over which the learning rate rises from zero.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="The learning rate behind its peak: it falls to zero, or constant: stays there."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon updates the layer's matrices with Muon and everything else with AdamW."
    )
    muon_learning_rate: float = Field(default=0.02, gt=0, description="Muon's peak learning rate, per step.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay, times the learning rate.")
    betas: Betas = Field(default=(0.9, 0.95), description="AdamW's decay of the mean and the mean square, per step.")
    clip_norm: float = Field(default=0.5, gt=0, description="Largest gradient norm; longer gradients are scaled to it.")
    ema_decay: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of an average of the weights that each step keeps; the average is what is measured and "
        "exported. null is none.",
    )
    unroll: int = Field(
        default=7, gt=0, le=32, description="Training-time-test depth: steps on the head's own features."
    )
    unroll_decay: float = Field(
        default=0.8, gt=0, le=1, description="Weight of an unroll step over that of the one before."
    )
    unroll_weights: Weights | None = Field(
        default=None, description="Weight of each unroll step, in turn; null leaves them to unroll_decay."
    )
    objective: Objective = Field(
        default="soft_cross_entropy",
        description="Loss between the head's distribution and the target's; the acceptance ones are the LK losses.",
    )
    objective_weight: float | None = Field(
        default=None, gt=0, description="Weight of the objective; null is 0.1 for eagle1 and 1 for other heads."
    )
    regression_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the smooth-L1 distance to the target's feature; null is 1 for eagle1, others have none.",
    )
    input_noise: float | None = Field(
        default=None,
        ge=0,
        description="Width of the noise on input features, times 512 / tokens; null is 0.2 for eagle1, 0 for others.",
    )
    activation_checkpointing: bool = Field(
        default=False, description="Keep less of each unroll step in memory and compute it again for the gradient."
    )
    checkpoint_every: int = Field(default=500, gt=0, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=2, gt=0, description="Newest checkpoints kept.")
    eval_every: int = Field(default=500, gt=0, description="Steps between measurements on held-out data.")
    eval_prompts: int = Field(default=8, ge=0, description="Held-out prompts decoded at each measurement; 0 is none.")
    export: Literal["newest", "best"] = Field(
        default="newest",
        description="Weights that become the head: the last ones, or those with the longest accepted length (mean of "
        "temperatures 0 and 1) at a measurement.",
    )
    log_every: int = Field(default=10, gt=0, description="Steps between logged metrics.")
    dry_run: bool = Field(
        default=False, description="Print sizes, memory, disk and steps of the run, and end before anything is spent."
    )

    @field_validator("export")
    @classmethod
    def best_is_measured(cls, export: str, section: ValidationInfo) -> str:
        if export == "best" and section.data.get("eval_prompts") == 0:
            raise ValueError("newest is allowed while train.eval_prompts is 0; decode prompts, or take the newest")
        return export

    @field_validator("unroll_weights")
    @classmethod
    def one_weight_for_each_step(
        cls, weights: tuple[float, ...] | None, section: ValidationInfo
    ) -> tuple[float, ...] | None:
        unroll = section.data.get("unroll")
        if weights is not None and unroll is not None and len(weights) != unroll:
            raise ValueError(f"a list of {unroll} weights, one for each of train.unroll, is allowed; change either")
        if weights is not None and not any(weights):
            raise ValueError("a list with a weight above 0 is allowed; otherwise nothing is learnt")
        return weights


class JointSection(Section):
    """Medusa-2: the target's layers learn with the heads; its embedding, final norm and lm_head stay as they are."""

    mode: Literal["lora", "full"] | None = Field(
        default=None,
        description="What of the target's layers learns beside a Medusa head: low-rank additions (LoRA, needs peft) or "
        "all, in float32; null leaves the target alone.",
    )
    lora_rank: int = Field(default=32, gt=0, description="Rank of the additions of mode lora.")
    learning_rate: float = Field(default=1e-4, ge=0, description="AdamW's peak learning rate for the target, per step.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps at the start in which the heads alone are trained.")
    distill_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the KL divergence between the original's and the tuned target's next token.",
    )


class DecodeSection(Section):
    """How drafts are made and grow, and how text is decoded."""

    drafter: DrafterKind = Field(
        default="head",
        description="Who drafts. head: the trained one; draft_model: another model; early_exit: the target's first "
        "layers; prompt_lookup: what followed the same words before; suffix: the same in a corpus; lookahead: the "
        "target's own parallel guesses.",
    )
    draft_model: HomeText | None = Field(
        default=None, description="Folder or hub name of a model that drafts; with another tokenizer, a chain of text."
    )
    exit_layers: int | None = Field(
        default=None, gt=0, description="Layers of the target that early_exit runs; null is half of them."
    )
    ngram: int = Field(default=3, gt=0, description="Longest run of tokens that prompt_lookup and suffix look up.")
    corpus: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="JSONL file of texts for suffix: rows with tokens, or with prompt and response."
    )
    growth: Literal["chain", "adaptive", "fixed", "searched", "searched_cost_aware", "dynamic", "cost_aware"] = Field(
        default="dynamic",
        description="Shape of the drafts. chain: one token per level; adaptive: a chain as long as recent acceptance "
        "pays for; fixed: the tree of decode.paths; searched: the best tree of fixed shape, as fitted to the head; "
        "dynamic: the likeliest nodes (EAGLE-2); cost_aware, searched_cost_aware: as deep and large as the measured "
        "costs of this machine's steps pay for.",
    )
    depth: int = Field(
        default=5, gt=0, le=64, description="Levels drafted per target step, one head step each; or the most."
    )
    width: int = Field(
        default=4, gt=0, description="Nodes expanded per level of a dynamic tree, and children of each; a chain has 1."
    )
    nodes: int = Field(
        default=16, gt=0, description="Drafted nodes of a tree that one target step verifies; or the most."
    )
    paths: Paths | None = Field(
        default=None,
        description="Every node of a fixed tree by the child numbers that lead to it: [[0], [1], [0, 0]].",
    )
    acceptance: Literal["seeded", "rejection", "typical"] = Field(
        default="seeded",
        description="How drafts are accepted when sampling. seeded: the very text of plain decoding with this seed; "
        "rejection: the same distribution, by rejection sampling; typical: Medusa's rule, which is lossy.",
    )
    typical_epsilon: float = Field(default=0.09, gt=0, le=1, description="Typical acceptance: chance that suffices.")
    typical_delta: float = Field(
        default=0.3, gt=0, description="Typical acceptance: chance that suffices, times exp(-entropy)."
    )
    top_k: int | None = Field(default=None, gt=0, description="Sample from so many likeliest tokens; null is all.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Sample from the likeliest tokens of this total chance.")
    min_p: float = Field(default=0.0, ge=0, le=1, description="Leave out tokens below this share of the likeliest's.")
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="Divides the logits of tokens of prompt and output; 1 is none."
    )
    presence_penalty: float = Field(default=0.0, description="Taken from the logits of tokens of the output, once.")
    frequency_penalty: float = Field(
        default=0.0, description="Taken from the logits of the output's tokens, each time."
    )
    max_new_tokens: int = Field(default=512, gt=0, description="Longest output, in tokens.")
    max_batch: int = Field(default=16, gt=0, description="Sequences decoded together, where many are given.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the sampling noise; it alone decides a sampled text."
    )

    @model_validator(mode="after")
    def fields_agree(self) -> "DecodeSection":
        for kind, field in (("draft_model", "draft_model"), ("suffix", "corpus")):
            if self.drafter == kind and self.model_dump()[field] is None:
                raise ValueError(f"drafter {kind} needs {field}; give decode.{field}")
        if self.drafter != "head" and self.growth in ("adaptive", "cost_aware"):
            raise ValueError(f"growth {self.growth} goes by a head's costs; {self.drafter} allows chain or dynamic")
        if self.drafter != "head" and self.growth in ("searched", "searched_cost_aware"):
            raise ValueError(f"growth {self.growth} was fitted to a head; {self.drafter} allows chain or dynamic")
        if self.drafter in ("prompt_lookup", "suffix", "lookahead") and self.growth == "fixed":
            raise ValueError(f"growth fixed asks for children at every node; {self.drafter} allows chain or dynamic")
        if (self.growth == "fixed") != (self.paths is not None):
            raise ValueError("growth fixed and paths go together; give both or neither")
        if self.acceptance == "rejection" and self.growth not in ("chain", "fixed", "searched"):
            raise ValueError(
                f"acceptance rejection allows growth chain, fixed or searched; {self.growth} looks at tokens that "
                f"were drawn before it keeps them, which would bias the output"
            )
        return self


class ReportSection(Section):
    """What the closing report measures."""

    prompts: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None,
        description="JSONL file of prompts by category, such as Spec-Bench's; null is the held-out ones.",
    )
    num_prompts: int = Field(default=80, gt=0, description="Prompts decoded per row, of each category in turn.")
    batches: Batches = Field(default=(1,), description="Prompts decoded together; every row is measured with each.")
    temperatures: Temperatures = Field(
        default=(0.0, 0.7), description="Sampling temperatures; every row is measured at each."
    )
    head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of the head to measure; null is the one that this run trained."
    )
    other_heads: Folders = Field(
        default={},
        description="Further heads of this target to measure beside it, {name: folder}: their rows bear the name, and "
        "they draft as the recipe says, no deeper than they have levels.",
    )
    warmup_prompts: int = Field(default=3, ge=0, description="Prompts decoded before the clock starts.")
    threads: int | None = Field(
        default=None, gt=0, description="CPU threads of each worker; null is torch's own choice, shared among them."
    )
    workers: int = Field(
        default=1,
        gt=0,
        description="Processes that share the prompts, on a CPU: a small target leaves cores idle that one more uses. "
        "Each prompt is still decoded in all ways by one of them, in turn.",
    )
    baselines: Baselines = Field(
        default=("generate", "plain", "untrained", "chain", "tree"),
        description="Rows of the table: our plain loop; generate of transformers, alone, with prompt lookup and with "
        "the draft model; each head as a chain and as a tree, an untrained one; the drafters that need no training.",
    )

    @field_validator("baselines")
    @classmethod
    def other_heads_have_rows(cls, baselines: tuple[str, ...], section: ValidationInfo) -> tuple[str, ...]:
        if section.data.get("other_heads") and {"chain", "tree"}.isdisjoint(baselines):
            raise ValueError("chain or tree is needed among them, to measure report.other_heads; add one")
        return baselines


class ExportSection(Section):
    """How a head is written for a serving engine."""

    format: Literal["native", "vllm", "sglang", "tensorrt_llm", "eagle", "speculators", "medusa"] = Field(
        default="vllm",
        description="Whose contract the export must meet. vllm, sglang and tensorrt_llm read the same files; eagle and "
        "medusa are the layouts of the authors' code, native only has to load here.",
    )
    head: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder of the head to export; null is the one that this run trained."
    )
    folder: Annotated[HomePath | None, Field(strict=False)] = Field(
        default=None, description="Folder to write; null is RUN_DIR/export/FORMAT."
    )
    dtype: Dtype | None = Field(default=None, description="Number format of the weights; null keeps the head's.")
    overwrite: bool = Field(default=False, description="Replace a head that is in the folder, or in push_to, already.")
    push_to: str | None = Field(
        default=None, min_length=1, description="Hub repository, org/name, to upload the folder to; null is none."
    )


class LogSection(Section):
    """Where metrics go besides the terminal and metrics.jsonl."""

    wandb: Literal["auto", "online", "offline", "disabled"] = Field(
        default="auto", description="auto is online when WANDB_API_KEY or WANDB_MODE is set, else offline."
    )
    project: str = Field(default="headstart", min_length=1, description="Weights & Biases project.")


class Recipe(Section):
    """One run, from prompts to report; every stage finds its input and puts its output under run_dir."""

    run_dir: HomePath = Field(description="Folder of everything that the run writes.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Seed of responses, initial weights and batch order.")
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

"""The typed recipe: every setting of a run is one field here, with its unit, range and default."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    model_validator,
)

from headstart.recipes.sampling import TEMPERATURE_MAX
from headstart.recipes.schema_heads import AnyHeadSection
from headstart.recipes.schema_train import JointSection, TrainSection
from headstart.recipes.values import (
    NO_REPEATS,
    Baselines,
    Batches,
    DeviceName,
    Devices,
    DrafterKind,
    Dtype,
    Folders,
    HomePath,
    HomeText,
    PathOrUrl,
    Section,
    Servers,
    SystemPrompts,
    Temperatures,
    with_day_as_text,
)

RANKED_GROWTHS = ("dynamic", "cost_aware")  # they expand a node by its decode.width likeliest children
SELF = "self"  # the data.prompts and data.heldout_prompts value for prompts that the target writes itself
HUB_PREFIX = "hf:"  # data.prompts starts with it to name a Hugging Face hub dataset


class TargetSection(Section):
    """The target model, whose output speculative decoding reproduces."""

    path: HomeText = Field(description="Local folder, .gguf file (or its folder) or hub name (org/name) of the target.")
    adapter: HomePath | None = Field(
        default=None, description="Folder of a PEFT LoRA adapter; the target is path with it merged in."
    )
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
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(with_day_as_text)] = Field(
        default={},
        description="Variables of the chat template, such as {enable_thinking: false}, for prompts, responses, reports "
        "and serving alike. date, a day such as 2026-11-26, is what templates take for today; without it servers use "
        "the present day, and a run the day on which its prompts were begun.",
    )
    compile: bool = Field(
        default=True,
        description="On a CPU with a C++ compiler, compile the layers of target and head in the background during "
        "decoding, if their weights are packed.",
    )
    exact: bool = Field(
        default=False,
        description="Refuse a target whose tokens do not get the same bits in every pass, and name the operation. On a "
        "CPU with a C++ compiler most types get them anyway, so that drafts, other rows and chunks of a prompt change "
        "no text; on a GPU this chooses kernels whose sums have one order.",
    )


class DataSection(Section):
    """The prompts that the target answers, and how its answers become training features."""

    prompts: HomeText = Field(
        description="Prompts or conversations to train on: a .jsonl, .parquet or .txt file, a folder written by the "
        f"datasets library, {HUB_PREFIX}org/name:split, or {SELF}: the target, a chat model, writes them itself "
        "(Magpie)."
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
    folder: PathOrUrl | None = Field(
        default=None, description="Folder of prompts, responses and features; recipes may share it; null is run_dir."
    )
    store: PathOrUrl | None = Field(
        default=None, description="Folder of an existing feature store to train on; null harvests from the prompts."
    )
    num_prompts: int = Field(gt=0, description="Number of prompts to train on.")
    prompt_tokens: int = Field(
        default=1024, gt=0, description="Longest prompt, in tokens; a longer one loses its beginning."
    )
    self_prompt_tokens: int = Field(
        default=256, gt=0, description=f"Longest user turn that the target writes with data.prompts {SELF}, in tokens."
    )
    self_temperature: float = Field(
        default=1.0,
        ge=0.01,
        le=TEMPERATURE_MAX,
        description=f"Sampling temperature of the user turns that data.prompts {SELF} writes.",
    )
    self_system_prompts: SystemPrompts | None = Field(
        default=None,
        description=f"System prompts that steer the topics of data.prompts {SELF}, used in turn; null among them is "
        "none. The finished prompts do not hold them: they are rendered as a server renders a user without one.",
    )
    self_pictures: HomePath | None = Field(
        default=None,
        description=f"Folder of pictures, about which the target of data.prompts {SELF} writes every second prompt; "
        "null: it writes texts alone.",
    )
    response_tokens: int = Field(default=1024, gt=0, description="Longest response, in tokens.")
    temperatures: Temperatures = Field(
        default=(0.0, 0.7, 1.0), description="Sampling temperatures, used in turn for the responses; 0 is greedy."
    )
    generate_batch: int = Field(
        default=32, gt=0, description="Responses that decode together, or as many as fit in memory."
    )
    harvest_batch: int = Field(
        default=8, gt=0, description="Samples in one target forward of the harvest; on a GPU more of short ones."
    )
    heldout_samples: int = Field(default=64, gt=0, description="Held-out samples for metrics, never trained on.")
    shard_samples: int = Field(default=256, gt=0, description="Samples per feature shard.")
    dtype: Literal["float32", "bfloat16", "float16", "float8", "int8"] = Field(
        default="bfloat16", description="Format of stored features; float8 and int8 keep one scale per token and tap."
    )
    online: Devices | None = Field(
        default=None,
        description="Devices of targets that compute features during training, which are then not stored: [auto] is "
        "the training process itself; others, such as [cuda:4, cuda:5], are assigned to the training processes in "
        "turn, each for a target in a process of its own. null stores all features, then trains.",
    )
    states: Literal["vllm"] | None = Field(
        default=None,
        description="vllm: the servers of data.server compute the features (vLLM's extract_hidden_states), too; null: "
        "the harvest loads the target.",
    )
    server: Servers | None = Field(
        default=None,
        description="URL, or list of URLs, of OpenAI-compatible servers whose target writes the responses; null is "
        "none.",
    )
    draft_head: HomePath | None = Field(
        default=None, description="Folder of a head that speeds up writing the responses; null is none."
    )

    @property
    def longest_sample(self) -> int:
        """The most tokens of a sample."""
        return self.prompt_tokens + self.response_tokens

    @property
    def server_writes(self) -> bool:
        """Whether the servers of data.server write the responses."""
        return self.responses == "target" and (self.server is not None or self.states is not None)

    @property
    def holds_out_own_prompts(self) -> bool:
        """Whether the held-out prompts are the target's own too."""
        return str(self.heldout_prompts) == SELF


class DecodeSection(Section):
    """How draft tokens are chosen and how text is decoded."""

    drafter: DrafterKind = Field(
        default="head",
        description="Source of draft tokens. head: the trained head; draft_model: a smaller model; "
        "prompt_lookup: repeats of earlier text.",
    )
    head: HomePath | None = Field(
        default=None,
        description="Folder of the head that report, calibrate, export, chat and serve use; null is RUN_DIR/head.",
    )
    draft_model: HomeText | None = Field(
        default=None, description="Folder or hub name of a draft model with the target's tokenizer."
    )
    growth: Literal["chain", "searched", "dynamic", "cost_aware"] = Field(
        default="dynamic",
        description="Shape of the draft tree. chain: one token per level; searched: the fixed shape fitted to "
        "the head; dynamic: the likeliest nodes (EAGLE-2); cost_aware: dynamic, with depth and size chosen from the "
        "step times measured on this machine.",
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
        description="Most draft tokens per step that are verified along with a head's tree because they followed the "
        "same words earlier in the text, or the same token in any text. They cost almost nothing where a step waits "
        "for the target's weights, and no CUDA graph holds such a step.",
    )
    max_new_tokens: int = Field(default=512, gt=0, description="Longest output, in tokens.")
    max_batch: int = Field(default=16, gt=0, description="Sequences decoded together in one batch.")

    @model_validator(mode="after")
    def fields_agree(self) -> "DecodeSection":
        if self.drafter == "draft_model" and self.draft_model is None:
            raise ValueError("drafter draft_model needs draft_model; give decode.draft_model")
        if self.drafter != "head" and self.growth not in ("chain", "dynamic"):
            raise ValueError(f"growth {self.growth} needs a trained head; {self.drafter} allows chain or dynamic")
        if self.repeats and self.drafter != "head":
            raise ValueError(f"repeats needs drafter head; {self.drafter} is given; write repeats: 0")
        return self


class ReportSection(Section):
    """The rows, prompts and conditions of the report."""

    prompts: HomePath | None = Field(
        default=None,
        description="JSONL or parquet file of prompts by category, such as SPEED-Bench's or Spec-Bench's ("
        "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench); null is the held-out prompts.",
    )
    num_prompts: int = Field(
        default=80, gt=0, description="Prompts for each row, of each category in turn; several turns count once."
    )
    batches: Batches = Field(default=(1,), description="Batch sizes; every row is measured with each.")
    temperatures: Annotated[Temperatures, NO_REPEATS] = Field(
        default=(0.0, 0.7), description="Sampling temperatures; every row is measured at each."
    )
    other_heads: Folders = Field(
        default={},
        description="More heads of this target to measure, {name: folder}; their rows carry the name. They draft as "
        "the recipe says, up to their own depth.",
    )
    threads: int | None = Field(default=None, gt=0, le=1024, description="CPU threads; null is torch's default.")
    baselines: Baselines = Field(
        default=("generate", "plain", "untrained", "chain", "tree"),
        description="Rows of the table. plain: our plain decoding; generate, generate_lookup, generate_assisted: "
        "transformers' generate, alone, with prompt lookup, with the draft model; chain, tree, cost_aware: each "
        "head alone, as a chain, as the recipe says, with growth cost_aware; repeats: each head as the recipe says, "
        "with decode.repeats; untrained: a random head, or the checkpoint's own MTP layer; "
        "others: the drafter of that name.",
    )


class ExportSection(Section):
    """How the head is exported for a serving engine, into RUN_DIR/export/FORMAT."""

    format: Literal["native", "vllm", "sglang", "tensorrt_llm", "speculators", "gguf"] = Field(
        default="vllm",
        description="Format of the export. vllm, sglang and tensorrt_llm read the same files; speculators is the "
        "library's layout, gguf llama.cpp's; native loads in headstart only.",
    )
    dtype: Dtype | Literal["float8"] | None = Field(
        default=None,
        description="Number format of the exported weights; null keeps the head's. float8 is that of the projections "
        "alone, of EAGLE heads for vllm.",
    )


class Recipe(Section):
    """One run, from prompts to report; its files are below run_dir, and those of its data in data.folder if given."""

    run_dir: PathOrUrl = Field(
        description="Folder for everything that the run writes, or its URL in an object store, as in s3://bucket/run."
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="Seed of prompts, responses, first weights, batch order, sampled texts."
    )
    target: TargetSection
    data: DataSection
    head: AnyHeadSection
    train: TrainSection
    joint: JointSection = JointSection()
    decode: DecodeSection = DecodeSection()
    report: ReportSection = ReportSection()
    export: ExportSection = ExportSection()

    @property
    def unroll(self) -> int:
        """Depths that training scores: all levels that the head drafts, or train.unroll if it can draft any number."""
        return self.head.levels or self.train.unroll

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
    def head_in_use(self) -> Path:
        """The folder of the head that decodes and is exported."""
        return self.decode.head or self.head_dir

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

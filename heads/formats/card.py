"""README.md of an export: what the head is, what was measured, and how each engine serves it."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from heads.base import DraftHead
from heads.formats.layouts import ServedTarget
from heads.formats.subject import Finding
from recipes.schema import Recipe

ENGINE_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt_llm": "TensorRT-LLM",
    "eagle": "the EAGLE authors' code",
    "speculators": "speculators",
    "medusa": "the Medusa authors' code",
}


def card(
    recipe: Recipe,
    head: DraftHead,
    target: ServedTarget,
    target_folder: Path,
    folder: Path,
    verdicts: dict[str, list[Finding]],
) -> str:
    """`verdicts` holds what each engine's contract finds; those without findings get a command."""
    source = recipe.export.head or recipe.head_dir
    own, unknown = source == recipe.head_dir, f"Not known here: the head comes from {source}."
    parts = [
        front_matter(head, target),
        f"# {head.kind} draft head for {target.name}",
        f"Drafts tokens for `{target.name}`, which then verifies them: the text stays the target's own.",
        "## What it is",
        "\n".join(facts(head)),
        "## Data",
        "\n".join(data(recipe, target_folder)) if own else unknown,
        "## Training",
        "\n".join(training(recipe)) if own else unknown,
        "## Measured",
        measured(recipe, source),
        "## Serving",
        *serving(head, target, folder, verdicts),
        "## Limits",
        "\n".join(limits(head)),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(head: DraftHead, target: ServedTarget) -> str:
    """What a model hub reads."""
    base = [] if Path(target.name).is_dir() else [f"base_model: {target.name}"]
    return "\n".join(["---", *base, "tags:", "- speculative-decoding", f"- {head.kind}", "---"])


def facts(head: DraftHead) -> Iterator[str]:
    parameters = sum(parameter.numel() for parameter in head.parameters())
    yield f"- {head.kind}, {parameters:,} parameters, width {head.feature_size}"
    yield f"- reads hidden_states {list(head.taps)} of the target's {head.target.num_layers} layers (i enters layer i)"
    vocab = head.vocab
    yield f"- drafts {len(vocab.ids):,} of the target's {vocab.target_size:,} tokens"


def data(recipe: Recipe, target_folder: Path) -> Iterator[str]:
    section = recipe.data
    yield f"- prompts: `{section.prompts}`, {section.num_prompts:,} of them, of at most {section.prompt_tokens} tokens"
    temperatures = ", ".join(f"{temperature:g}" for temperature in section.temperatures)
    yield (
        f"- responses: written by the target itself, at most {section.response_tokens} tokens, at temperatures "
        f"{temperatures} in turn"
    )
    yield f"- template: {template(target_folder)}"


def template(target_folder: Path) -> str:
    """The target's chat template by its digest, since a head is trained on one and served well with no other."""
    beside, config = target_folder / "chat_template.jinja", target_folder / "tokenizer_config.json"
    text = beside.read_text() if beside.is_file() else None
    if text is None and config.is_file():
        text = json.loads(config.read_text()).get("chat_template")
    if text is None:
        return "the target's tokenizer has none; prompts are continued as plain text"
    digest = hashlib.sha256(str(text).encode()).hexdigest()[:16]
    return f"the target's own for rows of messages (sha256 {digest}...); rows of plain text are continued as they are"


def training(recipe: Recipe) -> Iterator[str]:
    section = recipe.train
    yield (
        f"- {section.steps:,} steps of {section.batch_size} sequences, {section.optimizer}, learning rate "
        f"{section.learning_rate:g}, unrolled {section.unroll} times, objective {section.objective}"
    )
    rows = [json.loads(row) for row in lines_of(recipe.metrics_path)]
    scored = [row for row in rows if "heldout/loss_0" in row]
    if not scored:
        yield "- held-out figures: none found"
        return
    last = scored[-1]
    accuracies = [last[key] for key in sorted(last) if key.startswith("heldout/accuracy_")]
    shown = " ".join(f"{accuracy:.3f}" for accuracy in accuracies)
    yield f"- held out, after step {last['step']:,}: loss {last['heldout/loss_0']:.3f}, accuracy by depth {shown}"


def lines_of(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line] if path.is_file() else []


def measured(recipe: Recipe, source: Path) -> str:
    """tau with its conditions, if this run's report is of this head."""
    path = recipe.report_dir / "report.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if report.get("head") != str(source):
        return "Not measured. `python -m inference.report RECIPE` measures it."
    lines = ["| way | temperature | prompts | tau | x plain |", "| --- | ---: | ---: | ---: | ---: |"]
    for outcome in report["outcomes"]:
        if outcome["batch"] > 1 or outcome["way"].partition(" ")[0] in report["other_heads"]:
            continue
        ratio = outcome["speedups"]["plain"]["value"]
        row = [outcome["way"], f"{outcome['temperature']:g}", str(outcome["prompts"]), f"{outcome['tau']:.2f}"]
        lines.append("| " + " | ".join([*row, f"{ratio:.2f}"]) + " |")
    decode, machine = report["recipe"]["decode"], report["machine"]
    about = ", ".join(f"{name} {value}" for name, value in machine.items())
    lines += [
        "",
        "tau is the mean number of tokens per target step, the bonus included; measured by headstart's own decoding, "
        f"batch 1, at most {decode['max_new_tokens']} new tokens, drafts {decode['growth']} to depth "
        f"{decode['depth']}, target in {report['recipe']['target']['dtype']}; {about}.",
    ]
    return "\n".join(lines)


def serving(head: DraftHead, target: ServedTarget, folder: Path, verdicts: dict[str, list[Finding]]) -> Iterator[str]:
    for engine, found in verdicts.items():
        yield f"### {ENGINE_NAMES[engine]}"
        errors = [finding for finding in found if finding.severity == "error"]
        if errors:
            yield "Not served there:\n" + "\n".join(f"- {finding.where}: {finding.allowed}" for finding in errors)
        else:
            yield COMMANDS[engine](head, target, folder)


def vllm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    method = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa"}[head.kind]
    tokens = min(target.draft_tokens, head.max_levels or target.draft_tokens)
    options = json.dumps({"method": method, "model": str(folder), "num_speculative_tokens": tokens})
    return f"```\nvllm serve {target.name} --speculative-config '{options}'\n```"


def sglang_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    algorithm = {"eagle1": "EAGLE", "eagle3": "EAGLE3"}[head.kind]
    return (
        f"```\npython -m sglang.launch_server --model-path {target.name} --speculative-algorithm {algorithm} \\\n"
        f"    --speculative-draft-model-path {folder} --speculative-num-steps {target.draft_tokens} \\\n"
        f"    --speculative-eagle-topk 1 --speculative-num-draft-tokens {target.draft_tokens + 1}\n```"
    )


def tensorrt_llm_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    layers = [tap - 1 for tap in head.taps]
    return (
        "```\ncat > speculative.yaml <<END\nspeculative_config:\n  decoding_type: Eagle3\n"
        f"  max_draft_len: {target.draft_tokens}\n  speculative_model: {folder}\n"
        f"  eagle3_layers_to_capture: {layers}\nEND\n"
        f"trtllm-serve {target.name} --extra_llm_api_options speculative.yaml\n```"
    )


def eagle_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    use_eagle3 = head.kind == "eagle3"
    return (
        "```python\nfrom eagle.model.ea_model import EaModel\n\nmodel = EaModel.from_pretrained(\n"
        f'    base_model_path="{target.name}", ea_model_path="{folder}", use_eagle3={use_eagle3}\n)\n```'
    )


def medusa_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    return (
        "```python\nfrom medusa.model.medusa_model import MedusaModel\n\n"
        f'model = MedusaModel.from_pretrained("{folder}")\n```\n\n'
        f"It finds the target, `{target.name}`, in config.json."
    )


def speculators_command(head: DraftHead, target: ServedTarget, folder: Path) -> str:
    return f"```\nvllm serve {folder}\n```\n\nvLLM finds the target, `{target.name}`, in its config.json."


COMMANDS: dict[str, Callable[[DraftHead, ServedTarget, Path], str]] = {
    "vllm": vllm_command,
    "sglang": sglang_command,
    "tensorrt_llm": tensorrt_llm_command,
    "eagle": eagle_command,
    "speculators": speculators_command,
    "medusa": medusa_command,
}


def limits(head: DraftHead) -> Iterator[str]:
    dtype = str(next(head.parameters()).dtype).removeprefix("torch.")
    yield f"- context: {head.target.max_positions:,} tokens, the target's"
    yield f"- weights in {dtype}; an engine computes in the target's number format"
    yield "- for this target alone: another checkpoint, also a fine-tuned one, accepts fewer drafts"

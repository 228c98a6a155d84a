"""Does every model type that transformers registers decode losslessly, or say why not?

    python benchmarks/target_families.py             # all of them: half an hour on two cores
    python benchmarks/target_families.py qwen3_next mamba
    python benchmarks/target_families.py --list differs
    python benchmarks/target_families.py --bits     # renew only the column about bits, in both
    python benchmarks/target_families.py --write    # the last run as docs/targets.md and as the packaged table

A tiny random model of each causal and image-text-to-text type (`tiny_targets.py`) gets prompts of 9, 40 and 23 tokens
in float32, and a drafter that is partly right. Greedy text must equal transformers' `generate`; text at T = 1 must
equal our own plain decoding; and each row of a batch must get the text that it gets alone. Heads can be trained for a
type whose logits are its lm_head over its final norm, as their loss recomputes them. Outcomes:

trees, chains, own cache   lossless, with this kind of drafts; plain: without any
refused                    TargetModel or the loop says why not
near-tie                   all differences are between tokens whose scores are within 0.001 of each other
differs                    another text: the first difference, and its margin
crash                      any other exception, a dead process, or one that takes too long
not built                  no tiny model, or its own `generate` fails on text alone

In bfloat16, with packed weights, each token's logits must have the same bits in every pass of the method; otherwise the
first operation that differs is named.

An interrupted run continues where it stopped. Exit code 1 if a text differs or a process crashed.
"""

import argparse
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from target_page import STATES, UNKNOWN_CACHE, write_files, write_table
from tiny_targets import FIRST_WORD, TYPES, VOCAB, WORDS, make_target
from torch import Tensor
from transformers import PreTrainedModel

from headstart.common.progress import Progress
from headstart.data_pipelines.harvest_stages import LOGITS_TOLERANCE
from headstart.inference.core.cache import KVCache
from headstart.inference.core.request import GREEDY, Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.core.tree import Tree
from headstart.inference.core.verify import Verified, VerifiedOnHost
from headstart.inference.engine.loop import generate_batch
from headstart.inference.kernels.fast_layers import pack_weights
from headstart.inference.report.forcing import gaps
from headstart.inference.targets import check as check_of_methods
from headstart.inference.targets.check import KNOWN_METHODS, choose_method
from headstart.inference.targets.loading import in_one_line
from headstart.inference.targets.model import TargetModel
from headstart.targets import SAME, FamilyTable

LENGTHS, NEW_TOKENS, AHEAD = (9, 40, 23), 24, 5
TIE = 1e-3
# Never a token for padding, which takes no position in some families.
SAMPLED = Sampling(1.0, seed=3, logit_bias=tuple((token, -100.0) for token in range(3)))
PATIENCE = 300.0  # seconds for one family
FOLDER = Path("runs")


class PartlyRight:
    """Drafts the tokens that it knows to come next, one in four of them wrong; in trees, among wrong branches."""

    taps: tuple[int, ...] = ()
    cache_shape: tuple[int, int, int] | None = None
    max_nodes = depth = 1 + 3 * AHEAD
    static_shapes = False

    def __init__(self, texts: list[list[int]], branches: bool) -> None:
        self.texts, self.branches = texts, branches

    def prefill(self, taps: Tensor, text: Tensor, row: KVCache) -> None:
        """Do nothing: `draft` is given the whole text."""

    def draft(self, verified: Verified, cache: KVCache) -> Tree:
        assert isinstance(verified, VerifiedOnHost)
        rows = [self.row(row.text, row.remaining) for row in verified.rows]
        longest = max(len(tokens) for tokens, _ in rows)
        tokens = [own + [own[0]] * (longest - len(own)) for own, _ in rows]
        parents = [own + [-1] * (longest - len(own)) for _, own in rows]
        return Tree(torch.tensor(tokens), torch.tensor(parents))

    def row(self, prefix: list[int], left: int) -> tuple[list[int], list[int]]:
        """Tokens and parents. The random numbers depend on the text alone, so it drafts the same in any batch."""
        random = torch.Generator().manual_seed(1000 * len(prefix) + prefix[-1])
        known = next((text[len(prefix) :] for text in self.texts if text[: len(prefix)] == prefix), [])
        tokens, parents, last = [prefix[-1]], [-1], 0
        for token in known[: max(min(AHEAD, left), 0)]:
            drawn = torch.randint(VOCAB, (5,), generator=random).tolist()
            for wrong in drawn[: drawn[2] % 3] if self.branches else []:
                parents.append(drawn[3] % len(tokens))
                tokens.append(wrong)
            parents.append(last)
            last = len(tokens)
            tokens.append(drawn[2] if drawn[4] % 4 == 0 else token)
        return tokens, parents


@dataclass(frozen=True)
class Different:
    """A text that differs from its reference."""

    way: str  # greedy or T = 1; plain, alone or in a batch
    place: str  # tokens of the prompt + new tokens before the first difference
    margin: float  # between the scores of the two tokens there


def check(name: str) -> dict[str, Any]:
    """The outcome for one type, with what is known about its tiny model."""
    found: dict[str, Any] = {"family": name}
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(FIRST_WORD, WORDS, (length,), generator=random).tolist() for length in LENGTHS]
    try:
        model = make_target(name)
        found["weights"] = sum(parameter.numel() for parameter in model.parameters())
        texts = [own_texts(model, prompt) for prompt in prompts]
    except Exception as error:
        return {**found, "outcome": f"not built: {in_short(error)}"}
    try:
        target = TargetModel(model, taps=())
        found |= {"method": target.passes.method, "why": why_not_trees(target)}
        differences = list(differing(target, prompts, texts, target.passes.verifies_trees, found))
        found["harvest"] = harvests(target, prompts[1])
        found["bits"] = bits(name)
    except ValueError as error:
        at = last_line(error)
        is_ours = str(at.line).startswith("raise ") and "site-packages" not in at.filename
        reason = " ".join(str(error).split())
        return {**found, "outcome": f"refused: {reason}" if is_ours else f"crash: {in_short(error)}"}
    except Exception as error:
        return {**found, "outcome": f"crash: {in_short(error)}"}
    if not differences:
        return {**found, "outcome": target.passes.method}
    place, margin = max(((each.place, each.margin) for each in differences), key=itemgetter(1))
    ways = dict.fromkeys(each.way for each in differences)
    lead = "near-tie" if margin < TIE else "differs"
    return {**found, "outcome": f"{lead}: {', '.join(ways)}; largest margin {margin:.2g} after {place} tokens"}


def why_not_trees(target: TargetModel) -> str | None:
    """Why a target does not verify trees, in its own terms; None if it does."""
    KNOWN_METHODS.clear()
    failures = choose_method(target.passes)
    if target.passes.method == "trees" or any(failure.startswith("trees: ") for failure in failures):
        return "; ".join(failures) or None
    has_layers = target.passes.layout.empty is not None or any(failure.startswith("chains: ") for failure in failures)
    return "; ".join([STATES if has_layers else UNKNOWN_CACHE, *failures])


def harvests(target: TargetModel, prompt: list[int]) -> str:
    """Whether heads can be trained for a target: yes, or why not."""
    try:
        tapped = TargetModel(target.model, target.config.default_taps())
        output = tapped.passes.forward(torch.tensor([prompt]), last_only=True)
        tapped.frozen.refuse_other_logits(output.logits[0], output.last_hidden[0, -1:], LOGITS_TOLERANCE)
    except Exception as error:  # a model without a final norm or lm_head, or of another form
        message = " ".join(str(error).split()).removeprefix("target.path: ")
        return f"no: {message.partition('; such models cannot be trained for')[0]}"
    return "yes"


def bits(name: str) -> str:
    """SAME, or the first operation that gives a token other bits in another pass."""
    check_of_methods.ROUNDING_IN_HALF = math.inf  # random weights choose other experts in bfloat16
    model = make_target(name).bfloat16()
    model.config.dtype = torch.bfloat16
    pack_weights(model, exact=True)
    return TargetModel(model, ()).difference_in_bits or SAME


def only_bits(name: str) -> dict[str, Any]:
    try:
        return {"family": name, "bits": bits(name)}
    except Exception as error:
        return {"family": name, "bits": f"not tried: {in_one_line(error)}"}


def own_texts(model: PreTrainedModel, prompt: list[int]) -> list[list[int]]:
    """What transformers' own greedy `generate` writes; then what the forward over the whole text writes, if it differs.

    It does in a few families, whose `generate` passes other positions, or whose cache keeps less. Raises ValueError for
    a model that does not continue text.
    """
    tokens = torch.tensor([prompt])
    with torch.inference_mode():
        written: Any = cast(Any, model).generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    if model.config.is_encoder_decoder or written.sequences.shape[1] != len(prompt) + NEW_TOKENS:
        raise ValueError("its generate does not continue a text of tokens")
    if not torch.stack(written.logits).isfinite().all():
        raise ValueError("its logits are not finite")
    text: list[int] = written.sequences[0, len(prompt) :].tolist()
    if own_choices(model, prompt, text) == text:
        return [text]
    again = [*text]
    for place in range(NEW_TOKENS):
        again[place] = own_choices(model, prompt, again[: place + 1])[-1]
    return [text, again]


def own_choices(model: PreTrainedModel, prompt: list[int], text: list[int]) -> list[int]:
    """What the model's own forward over the whole text likes best at each of its places."""
    with torch.inference_mode():
        output: Any = model(input_ids=torch.tensor([prompt + text]), use_cache=False)
    choices: list[int] = output.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    return choices


def differing(
    target: TargetModel, prompts: list[list[int]], texts: list[list[list[int]]], branches: bool, found: dict[str, Any]
) -> Iterator[Different]:
    """The texts that differ from their reference."""
    for what, sampling in (("greedy", GREEDY), ("T = 1", SAMPLED)):
        requests = [Request(prompt, NEW_TOKENS, sampling) for prompt in prompts]
        plain = [generate_batch(target, [request])[0].tokens for request in requests]
        wanted = plain
        if sampling is GREEDY:
            wanted = [own if own in known else known[0] for own, known in zip(plain, texts, strict=True)]
        found[f"distinct, {what}"] = [len(set(text)) for text in wanted]
        drafter = PartlyRight([prompt + text for prompt, text in zip(prompts, wanted, strict=True)], branches)
        alone = [generate_batch(target, [request], drafter)[0] for request in requests]
        together = generate_batch(target, requests, drafter)
        found[f"tokens a step, {what}"] = [round(each.stats.acceptance_length, 2) for each in alone]
        ways = {"plain": plain, "alone": [each.tokens for each in alone], "batch": [each.tokens for each in together]}
        for way, written in ways.items():
            for number, (text, other) in enumerate(zip(written, wanted, strict=True)):
                if text != other:
                    at = next((i for i, pair in enumerate(zip(text, other, strict=False)) if len({*pair}) > 1), -1)
                    read = [gaps(target, prompts[number], each[: at + 1], sampling) for each in (text, other)]
                    margin = max(float(each[-1]) for each in read) if at >= 0 else float("nan")  # one text just ends
                    yield Different(f"{what} {way}", f"{len(prompts[number])} + {at}", margin)


def in_short(error: Exception) -> str:
    """Its message in one line, with the place where it was raised."""
    place = last_line(error)
    return f"{in_one_line(error)} ({type(error).__name__}, {Path(place.filename).name}:{place.lineno})"


def last_line(error: Exception) -> traceback.FrameSummary:
    """Where it was raised."""
    return traceback.extract_tb(error.__traceback__)[-1]


def answer(check: Callable[[str], dict[str, Any]], name: str, to: Connection) -> None:
    """Check one type in this process, which may die or hang of it."""
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    torch.set_num_threads(1)
    to.send(check(name))


def check_apart(name: str, check: Callable[[str], dict[str, Any]] = check) -> dict[str, Any]:
    """`check` in a process of its own."""
    started = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(check, name, theirs), daemon=True)
    process.start()
    theirs.close()
    found: dict[str, Any] = {"family": name}
    try:
        found = ours.recv() if ours.poll(PATIENCE) else {**found, "outcome": f"crash: no answer in {PATIENCE:g} s"}
    except EOFError:
        process.join()
        found["outcome"] = f"crash: the process ended with code {process.exitcode}"
    process.kill()
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def check_all(
    names: list[str], jobs: int, results: Path | None, check: Callable[[str], dict[str, Any]] = check
) -> list[dict[str, Any]]:
    """Check these types, and append each result to the file as it comes; those that it holds are not checked again."""
    found = read(results) if results is not None and results.exists() else []
    left = [name for name in names if name not in {each["family"] for each in found}]
    with ThreadPoolExecutor(jobs) as pool, Progress("types", len(names), "types", len(found)) as bar:
        futures = [pool.submit(check_apart, name, check) for name in left]
        try:
            for future in as_completed(futures):
                found.append(future.result())
                if results is not None:
                    with results.open("a") as file:
                        file.write(json.dumps(found[-1]) + "\n")
                bar.advance(1, found[-1]["family"])
        finally:
            for future in futures:
                future.cancel()
    return found


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def group(result: dict[str, Any]) -> str:
    return str(result["outcome"]).partition(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TYPE", help="the types to check; all by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    parser.add_argument("--list", metavar="OUTCOME", help="list the last run's types with this outcome")
    parser.add_argument("--bits", action="store_true", help="renew the column about bits in both")
    parser.add_argument("--write", action="store_true", help="write docs/targets.md and the packaged table of it")
    options = parser.parse_args()
    if unknown := {*options.names} - {*TYPES}:
        parser.error(f"transformers {transformers.__version__} registers no {', '.join(sorted(unknown))}")
    whole = FOLDER / f"target_families_{transformers.__version__}.jsonl"
    unfinished = whole.with_suffix(".partial")
    results = whole if whole.exists() else unfinished
    if (options.list or options.write) and not results.exists():
        parser.error(
            f"no run of transformers {transformers.__version__} in {FOLDER}; first check all types, without options"
        )
    if options.bits:
        table, partial = FamilyTable.packaged(), FOLDER / "bits.partial"
        FOLDER.mkdir(exist_ok=True)
        names = [name for name, family in table.families.items() if family.is_target]
        known = {each["family"]: each.get("bits") for each in check_all(names, options.jobs, partial, only_bits)}
        families = {name: replace(family, bits=known.get(name)) for name, family in table.families.items()}
        write_files(replace(table, families=families))
        partial.unlink()
        return
    if options.write:
        write_table(read(results), TYPES, transformers.__version__, date.fromtimestamp(results.stat().st_mtime))
        return
    if options.list:
        found = [each for each in read(results) if group(each) == options.list]
    elif options.names:
        found = check_all(options.names, options.jobs, None)
    else:
        FOLDER.mkdir(exist_ok=True)
        found = check_all(TYPES, options.jobs, unfinished)
        unfinished.replace(whole)
        print(f"transformers {transformers.__version__}, {len(found)} types, in {whole}:")
    if options.list or options.names:
        for each in sorted(found, key=lambda each: str(each["family"])):
            print(f"{each['family']}: {each['outcome']}")
        return
    counts = Counter(map(group, found))
    for outcome, count in counts.most_common():
        print(f"{count:5} {outcome}")
    sys.exit(1 if counts["differs"] or counts["crash"] else 0)


if __name__ == "__main__":
    multiprocessing.get_context("forkserver").set_forkserver_preload(["headstart.inference.report.compare"])
    main()

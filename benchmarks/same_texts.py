"""Is each text plain decoding's own, whatever else the passes compute? Writes every text in several ways and counts.

    python benchmarks/same_texts.py question.jsonl models/SmolLM2-135M-Instruct assets/smollm2_head --dtype bfloat16

The questions are Spec-Bench's (github.com/hemingkx/Spec-Bench); later turns follow plain decoding's answers. Each text
is appended to a file in --out at once, so an interrupted run continues; with --ways several processes share the work.
All texts are compared with plain decoding's.

plain        each text alone, after a prompt that is read in one pass
drafts       each text alone, with the head's trees and repeats
rows         16 rows at once
everything   16 rows with trees and repeats, prompts in chunks of 37 tokens next to the rows' steps
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from headstart.common.files import read_jsonl
from headstart.common.progress import Progress
from headstart.inference.core.request import Request
from headstart.inference.core.sampling import Sampling
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.model import SpeculativeModel
from headstart.inference.report.questions import Prompt, QuestionTemplate, read_questions
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import DecodeSection, TargetSection

WAYS = {  # whether a way drafts, its rows, and the tokens of its chunks
    "plain": (False, 1, None),
    "drafts": (True, 1, None),
    "rows": (False, 16, None),
    "everything": (True, 16, 37),
}


def write_texts(model: SpeculativeModel, requests: Sequence[Request], way: str, path: Path) -> list[list[int]]:
    """The texts of all requests, of which the file holds those that are written already, by number."""
    drafts, rows, chunk = WAYS[way]
    done = {line["number"]: line["tokens"] for line in read_jsonl(path)} if path.is_file() else {}
    loop = DecodeLoop(model.target, model.drafter if drafts else None, rows, prefill_chunk=chunk)
    left = {loop.submit(request): number for number, request in enumerate(requests) if number not in done}
    with path.open("a") as file, Progress(path.stem, len(requests), "texts") as progress:
        progress.advance(len(done))
        for _ in loop.run():
            for submitted, written in loop.take_ended():
                number = left[submitted]
                done[number] = written.tokens
                print(json.dumps({"number": number, "tokens": written.tokens}), file=file, flush=True)
                progress.advance(1)
    return [done[number] for number in range(len(requests))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--count", type=int, default=240, help="questions, of each category in turn")
    parser.add_argument("--tokens", type=int, default=40, help="of each text, at most")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path, default=Path("runs/same_texts"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    template = ChatTemplate.of(TargetSection(path=options.target, dtype=options.dtype))
    model = SpeculativeModel.from_folders(
        options.target, options.head, DecodeSection(repeats=8), dtype=options.dtype, device="cpu"
    )
    first = read_questions(options.questions, template, 1024, options.count)
    chat = QuestionTemplate(template, model.target.max_positions - options.tokens)
    for temperature in options.temperatures:
        sampling, found = Sampling(temperature, seed=1), dict[str, list[list[int]]]()
        for way in dict.fromkeys(["plain", *options.ways]):
            texts, prompts = list[list[int]](), list[Prompt | None](map(chat.shortened, first))
            turn = 1
            while asked := [prompt for prompt in prompts if prompt is not None]:
                requests = [Request(prompt.tokens, options.tokens, sampling) for prompt in asked]
                path = options.out / f"{way}_{temperature:g}_turn{turn}.jsonl"
                texts += write_texts(model, requests, way, path)
                answers = texts[-len(asked) :] if way == "plain" else found["plain"][len(texts) - len(asked) :]
                prompts, turn = [chat.next_turn(*each) for each in zip(asked, answers, strict=False)], turn + 1
            found[way] = texts
            same = sum(map(list.__eq__, texts, found["plain"]))
            print(f"{options.dtype}, T = {temperature:g}, {way}: {same} of {len(texts)} texts", flush=True)


if __name__ == "__main__":
    main()

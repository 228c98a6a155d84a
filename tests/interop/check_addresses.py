"""Check the addresses, paper numbers and links of README.md, docs/ and the code.

`make docs` runs this, without a network. An address of GitHub or of the Hugging Face hub must belong to a repository of
the list below, which was checked by hand, and must name a commit instead of a branch if it leads to a file. An arXiv
number must have the form YYMM.NNNNN of a month that has come. A relative link must lead to a file of this repository,
its anchor to a heading. `tests/laws/test_remedies.py` checks commands, options, recipe keys and files. Exit code 1 for
any mistake.
"""

import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "assets/**/*.md")
CODE = ("recipes", "heads", "inference", "data_pipelines", "trainers", "headstart", "common", "benchmarks", "examples")
REPOSITORIES = {
    "github.com": {
        "NVIDIA/Model-Optimizer",
        "hemingkx/Spec-Bench",
        "sgl-project/SpecForge",
        "vllm-project/speculators",
    },
    "huggingface.co": {"HuggingFaceTB/SmolLM2-135M-Instruct", "datasets/nvidia/SPEED-Bench"},
}
OTHER_HOSTS = {"arxiv.org", "www.w3.org"}
ADDRESS = re.compile(
    r"(?<![\w.@/])(?:https?://)?((?:github\.com|huggingface\.co)/[\w./-]*\w|(?<=://)[\w-]+(?:\.[\w-]+)+[\w./-]*)"
)
PAPER = re.compile(r"(?<![\w./-])(?:arXiv[: ]|arxiv\.org/(?:abs|pdf)/|\[)(\d{3,}\.\d+)\b")
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")
FIRST_YEAR = 2007  # arXiv numbers have this form since April of it


def mistakes_in(text: str, path: Path) -> Iterator[str]:
    """What is wrong with the addresses, papers and links of a text that stands in this file."""
    yield from wrong_addresses(text)
    yield from (f"arXiv {number}: no month that has come" for number in PAPER.findall(text) if not is_paper(number))
    if path.suffix == ".md":
        yield from broken_links(text, path)


def wrong_addresses(text: str) -> Iterator[str]:
    for address in ADDRESS.findall(text):
        host, *parts = address.split("/")
        known = REPOSITORIES.get(host)
        if known is None:
            if host not in OTHER_HOSTS and not re.fullmatch(r"[\d.]+", host):
                yield f"{address}: the host {host} is not in OTHER_HOSTS"
            continue
        name = "/".join(parts[: 3 if parts[:1] == ["datasets"] else 2])
        if name not in known:
            yield f"{address}: the repository {name} is not in REPOSITORIES"
        if "/blob/" in address and not re.search(r"/blob/[0-9a-f]{40}/", address):
            yield f"{address}: names a branch, whose files may move; name a commit"


def is_paper(number: str) -> bool:
    """Whether an arXiv number has the form YYMM.NNNNN (four digits at the end before 2015) of a month that has come."""
    match = re.fullmatch(r"(\d\d)(\d\d)\.(\d{4,5})", number)
    if match is None:
        return False
    year, month = 2000 + int(match[1]), int(match[2])
    today = date.today()
    in_time = (FIRST_YEAR, 4) <= (year, month) <= (today.year, today.month)
    return in_time and 1 <= month <= 12 and len(match[3]) == (5 if year >= 2015 else 4)


def broken_links(text: str, path: Path) -> Iterator[str]:
    for link, anchor in LINK.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        page = (path.parent / link).resolve() if link else path
        if not page.exists():
            yield f"({link}): there is no such file"
        elif anchor and page.suffix == ".md" and anchor not in anchors(page.read_text(encoding="utf-8")):
            yield f"({link}#{anchor}): there is no such heading"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the site and git hosts make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def files() -> list[Path]:
    pages = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    code = [path for folder in CODE for kind in ("py", "yaml") for path in sorted((ROOT / folder).rglob(f"*.{kind}"))]
    return [*pages, *code]


def main() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in files()}
    mistakes = [f"{path.relative_to(ROOT)}: {each}" for path, text in texts.items() for each in mistakes_in(text, path)]
    print(*mistakes, f"{len(texts)} files, {len(mistakes)} mistakes", sep="\n")
    sys.exit(bool(mistakes))


if __name__ == "__main__":
    main()

"""The law of addresses: each leads to a known repository, paper, file or heading, and a wrong one is found."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/interop"))

from check_addresses import files, mistakes_in  # noqa: E402


def test_every_address_paper_and_link_of_the_documents_and_the_code_is_right() -> None:
    mistakes = [f"{path.relative_to(ROOT)}: {each}" for path in files() for each in mistakes_in(path.read_text(), path)]
    assert not mistakes, mistakes


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("see github.com/hemingkexia/Spec-Bench", "the repository hemingkexia/Spec-Bench is not in REPOSITORIES"),
        ("https://github.com/sgl-project/SpecForge/blob/main/README.md", "names a branch"),
        ("https://docs.example.org/page", "the host docs.example.org is not in OTHER_HOSTS"),
        ("EAGLE-3 (arXiv 2513.01840)", "arXiv 2513.01840"),
        ("[2503.0184](https://arxiv.org/abs/2503.0184)", "arXiv 2503.0184"),
        ("arXiv 9901.00001", "arXiv 9901.00001"),
        ("[a page](docs/no_page.md)", "there is no such file"),
        ("[a heading](docs/structure.md#no-heading)", "there is no such heading"),
    ],
)
def test_a_wrong_one_is_found(text: str, mistake: str) -> None:
    right = (
        "See [structure](docs/structure.md#the-folders), arXiv 2503.01840 and https://github.com/sgl-project/SpecForge."
    )
    assert not [*mistakes_in(right, ROOT / "README.md")]
    assert any(mistake in each for each in mistakes_in(f"{right} {text}", ROOT / "README.md"))

"""The target and the servers that the tests of this folder share. Imports are inside, as in tests/conftest.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from server_run import Running

    from headstart.inference.serve.service import Served

# Each variable that the server passes on leaves a trace in the prompt.
TEMPLATE = (
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ m.reasoning_content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments.at }}>{% endfor %}"
    "{% endfor %}{{ mood }}{{ reasoning_effort }}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> "Served":
    """A target that each test may serve with its own settings; shared, so do not change it."""
    from server_run import load_served

    return load_served(tmp_path_factory.mktemp("served") / "target")


@pytest.fixture(scope="session")
def server(served: "Served") -> Iterator["Running"]:
    from server_run import NAME, running

    from headstart.inference.serve.options import ServerSettings

    settings = ServerSettings((NAME, "alias"), max_batch=4, max_queue=4, max_body=2**20, body_timeout=2.0)
    with running(served, settings) as started:
        yield started


@pytest.fixture(scope="session")
def templated(served: "Served") -> Iterator["Running"]:
    from server_run import NAME, load_served, running
    from tokenizers.processors import TemplateProcessing

    from headstart.inference.serve.options import ServerSettings

    own = load_served(Path(str(served.about["folder"])))
    tokenizer: Any = own.tokenizer
    tokenizer.chat_template = TEMPLATE
    special = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.backend_tokenizer.post_processor = special
    with running(own, ServerSettings((NAME,), max_batch=4)) as started:
        yield started

"""How many training samples a recipe can have at most, before its prompts are tokenized."""

from itertools import islice

from headstart.data_pipelines.prompts.rows import BadRow, read_rows
from headstart.recipes.schema import HUB_PREFIX, PYTHON_STDLIB, SELF, DataSection


def most_samples(data: DataSection, enough: int | None = None) -> int:
    """data.num_prompts, or the readable rows of data.prompts if these are fewer; counting stops at `enough`.

    The rows of a hub dataset are not counted, nor given conversations, one of which can give several samples.
    """
    if data.responses == "given" or data.prompts in (PYTHON_STDLIB, SELF) or data.prompts.startswith(HUB_PREFIX):
        return data.num_prompts
    readable = (row for row in read_rows(data.prompts) if not isinstance(row.fields, BadRow))
    return sum(1 for _ in islice(readable, min(data.num_prompts, enough or data.num_prompts)))

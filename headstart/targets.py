"""Say how headstart decodes a model: with trees of draft tokens, with chains, without drafts, or not at all.

    headstart targets                         # every model type that was tried, by how it decodes
    headstart targets qwen3_next              # one model type, with the sizes of its default configuration
    headstart targets path/to/model           # a model's folder, or its config.json
    headstart targets Qwen/Qwen3-8B           # a model on the hub; only its config.json is fetched

No weights are read. How a model type decodes was found with a tiny random model of it, and stands in a table
(docs/targets.md explains its words); what its layers keep in memory is computed from the configuration itself. When a
model is loaded, its own weights are tried in the same way, in the number format that it is loaded in. That trial
decides; this command only says what to expect.
"""

from headstart.options import targets_options

if __name__ == "__main__":
    targets_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

import difflib
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from transformers import CONFIG_MAPPING, PreTrainedConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

"""Text to tokens: the target's own tokenizer and chat template."""

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Tokenizer", "encode_prompt", "load_tokenizer"]

PROMPT_FIELDS = "prompt or text (a string), or messages (a list of {role, content})"


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return tokenizer


def encode_prompt(tokenizer: Tokenizer, row: dict[str, Any], where: str) -> list[int]:
    """The tokens that the target continues: plain text as it is, messages up to the last user turn in its template.

    Raises ValueError, naming `where`, for a row with no prompt in it.
    """
    if isinstance(row.get("messages"), list):
        messages = list(row["messages"])
        if not all(isinstance(turn, dict) and {"role", "content"} <= turn.keys() for turn in messages):
            raise ValueError(f"{where}: messages hold something else than turns; a row needs {PROMPT_FIELDS}")
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the target writes this turn itself
        if not messages:
            raise ValueError(f"{where}: messages hold no turn to answer; give at least one user turn")
        if tokenizer.chat_template is None:
            raise ValueError(f"{where}: messages need a chat template and the target's tokenizer has none; give prompt")
        try:
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # many templates refuse some orders of roles
            raise ValueError(f"{where}: the target's chat template refuses these messages ({error})") from error
        return list(tokenizer(str(rendered), add_special_tokens=False)["input_ids"])  # the template writes its own
    text = row.get("prompt", row.get("text"))
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: fields {sorted(row)} given, a row needs {PROMPT_FIELDS}")
    return list(tokenizer(text)["input_ids"])

"""Turn a parsed row into samples in the target's tokens: prompts to answer, or whole texts with what is trained on."""

from collections.abc import Iterator

from headstart.data_pipelines.prompts.chat_masks import ChatTemplate, MaskedTokens, runs
from headstart.data_pipelines.prompts.conversations import Conversation, Parsed, PromptAndAnswer, TokenRow, parse_row
from headstart.data_pipelines.prompts.row_report import TOO_LONG
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.tokenizer import Tokenizer
from headstart.recipes.schema import DataSection


def samples_of(tokenizer: Tokenizer, parsed: Parsed, row: Json, data: DataSection) -> Iterator[Json]:
    """The samples of a row: one prompt for the target to answer, or the row's own samples (data.responses given)."""
    if data.responses == "target":
        tokens = encode_prompt(tokenizer, parsed)
        yield {"tokens": tokens[-data.prompt_tokens :], "cut": len(tokens) > data.prompt_tokens}
        return
    longest = data.prompt_tokens + data.response_tokens
    for given in given_samples(tokenizer, parsed, row, data):
        if len(given.tokens) > longest:
            why = f"{len(given.tokens)} tokens; data.prompt_tokens and data.response_tokens allow {longest}"
            raise BadRow(TOO_LONG, why)
        prompt = given.tokens[: given.spans[-1][0]]
        yield {"tokens": prompt, "cut": False, "text": given.tokens, "spans": [list(span) for span in given.spans]}


def encode_prompt(tokenizer: Tokenizer, parsed: Parsed) -> list[int]:
    """The tokens for the target to continue, without a final answer; raises BadRow for a row without a prompt."""
    if isinstance(parsed, Conversation):
        return ChatTemplate(tokenizer).prompt(parsed)
    if isinstance(parsed, TokenRow):
        spans = runs(parsed.loss_mask)
        return parsed.tokens[: spans[-1][0]] if spans and spans[-1][0] else parsed.tokens
    tokens = encode(tokenizer, parsed.prompt if isinstance(parsed, PromptAndAnswer) else parsed)
    if not tokens:
        raise BadRow("empty", "the target's tokenizer makes no token of the text; give other text")
    return tokens


def given_samples(tokenizer: Tokenizer, parsed: Parsed, row: Json, data: DataSection) -> list[MaskedTokens]:
    """A row's own text and the ranges to train on; in a plain text, everything after the first token."""
    if isinstance(parsed, Conversation):
        return ChatTemplate(tokenizer).masked(parsed, data.turns)
    if isinstance(parsed, PromptAndAnswer):
        return [join(tokenizer, parsed)]
    if isinstance(parsed, str) and row.get("prompt") is not None:
        given = f"fields {sorted(row)} given; with a prompt, data.responses=given needs response or completion"
        raise BadRow("no response", f"{given}; add it, name a whole text text, or choose data.responses=target")
    tokens = parsed.tokens if isinstance(parsed, TokenRow) else encode(tokenizer, parsed)
    mask = parsed.loss_mask if isinstance(parsed, TokenRow) else [True] * len(tokens)
    spans = runs([False, *mask[1:]])  # nothing predicts the first token
    if not spans:
        raise BadRow("nothing to train on", "no token to train on; set loss_mask values to 1, or give a longer text")
    return [MaskedTokens(tokens, spans if data.turns == "all" else spans[-1:])]


def join(tokenizer: Tokenizer, pair: PromptAndAnswer) -> MaskedTokens:
    """A prompt and its answer as one text that ends with the end token; the answer is trained on.

    The prompt's tokens are those that the target would be given alone, so the answer is tokenized apart if a token of
    the joined text would hold the end of one and the start of the other.
    """
    prompt, whole = encode(tokenizer, pair.prompt), encode(tokenizer, pair.prompt + pair.answer)
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        whole = prompt + encode(tokenizer, pair.answer, add_special_tokens=False)
    if tokenizer.eos_token_id is not None and whole[-1] != tokenizer.eos_token_id:
        whole.append(tokenizer.eos_token_id)
    start = max(len(prompt), 1)  # nothing predicts the first token
    return MaskedTokens(whole, [(start, len(whole))])


def encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text of any length."""
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])


def parse_known(tokenizer: Tokenizer, row: Json) -> Parsed:
    """Parse a row; raises BadRow for token ids outside the target's vocabulary."""
    parsed = parse_row(row, has_template=tokenizer.chat_template is not None)
    if isinstance(parsed, TokenRow):
        unknown = [token for token in parsed.tokens if not 0 <= token < len(tokenizer)]
        if unknown:
            why = f"token {unknown[0]} given; the target's tokens are 0 to {len(tokenizer) - 1}"
            raise BadRow("unknown token", why)
    return parsed

"""Turn a parsed row into samples in the target's tokens: prompts to answer, or whole texts with what is trained on."""

from collections.abc import Iterator

from headstart.data_pipelines.prompts.chat_masks import ChatMasks, MaskedTokens, runs
from headstart.data_pipelines.prompts.conversations import Conversation, Parsed, PromptAndAnswer, TokenRow, parse_row
from headstart.data_pipelines.prompts.row_report import TOO_LONG
from headstart.data_pipelines.prompts.rows import BadRow
from headstart.data_pipelines.stages.stage import Json
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.recipes.schema import DataSection


def samples_of(chat: ChatMasks, parsed: Parsed, row: Json, data: DataSection) -> Iterator[Json]:
    """The samples of a row: one prompt for the target to answer, or the row's own samples (data.responses given)."""
    if data.responses == "target":
        tokens = encode_prompt(chat, parsed)
        yield {"tokens": tokens[-data.prompt_tokens :], "cut": len(tokens) > data.prompt_tokens}
        return
    longest = data.prompt_tokens + data.response_tokens
    for given in given_samples(chat, parsed, row, data):
        if len(given.tokens) > longest:
            why = f"{len(given.tokens)} tokens; data.prompt_tokens and data.response_tokens allow {longest}"
            raise BadRow(TOO_LONG, why)
        prompt = given.tokens[: given.spans[-1][0]]
        yield {"tokens": prompt, "cut": False, "text": given.tokens, "spans": [list(span) for span in given.spans]}


def encode_prompt(chat: ChatMasks, parsed: Parsed) -> list[int]:
    """The tokens for the target to continue, without a final answer; raises BadRow for a row without a prompt."""
    if isinstance(parsed, Conversation):
        return chat.prompt(parsed)
    if isinstance(parsed, TokenRow):
        spans = runs(parsed.loss_mask)
        return parsed.tokens[: spans[-1][0]] if spans and spans[-1][0] else parsed.tokens
    tokens = chat.template.encode_text(parsed.prompt if isinstance(parsed, PromptAndAnswer) else parsed)
    if not tokens:
        raise BadRow("empty", "the target's tokenizer makes no token of the text; give other text")
    return tokens


def given_samples(chat: ChatMasks, parsed: Parsed, row: Json, data: DataSection) -> list[MaskedTokens]:
    """A row's own text and the ranges to train on; in a plain text, everything after the first token."""
    if isinstance(parsed, Conversation) and (answered := parsed.answered()).messages:
        return chat.masked(answered, data.turns)
    if isinstance(parsed, PromptAndAnswer):
        return [join(chat.template, parsed)]
    if isinstance(parsed, Conversation) or (isinstance(parsed, str) and row.get("prompt") is not None):
        given = (
            f"fields {sorted(row)} given; data.responses=given needs response or completion beside prompt, or a turn"
        )
        remedy = "add it, name a whole text text, or choose data.responses=target"
        raise BadRow("no response", f"{given} of the assistant; {remedy}")
    tokens = parsed.tokens if isinstance(parsed, TokenRow) else chat.template.encode_text(parsed)
    mask = parsed.loss_mask if isinstance(parsed, TokenRow) else [True] * len(tokens)
    spans = runs([False, *mask[1:]])  # nothing predicts the first token
    if not spans:
        raise BadRow("nothing to train on", "no token to train on; set loss_mask values to 1, or give a longer text")
    return [MaskedTokens(tokens, spans if data.turns == "all" else spans[-1:])]


def join(template: ChatTemplate, pair: PromptAndAnswer) -> MaskedTokens:
    """A prompt and its answer as one text that ends with an end token; the answer is trained on.

    The prompt's tokens are those that the target would be given alone, so the answer is tokenized apart if a token of
    the joined text would hold the end of one and the start of the other.
    """
    prompt, whole = template.encode_text(pair.prompt), template.encode_text(pair.prompt + pair.answer)
    if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
        whole = prompt + template.encode(pair.answer)
    tokenizer = template.tokenizer
    if tokenizer.eos_token_id is not None and whole[-1] not in tokenizer.all_special_ids:
        whole.append(tokenizer.eos_token_id)
    start = max(len(prompt), 1)  # nothing predicts the first token
    return MaskedTokens(whole, [(start, len(whole))])


def parse_known(template: ChatTemplate, row: Json) -> Parsed:
    """Parse a row; raises BadRow for token ids outside the target's vocabulary."""
    parsed = parse_row(row, template.is_turn)
    if isinstance(parsed, TokenRow):
        known = len(template.tokenizer)
        unknown = [token for token in parsed.tokens if not 0 <= token < known]
        if unknown:
            raise BadRow("unknown token", f"token {unknown[0]} given; the target's tokens are 0 to {known - 1}")
    return parsed

"""One colour per draft depth, for texts that show where each of their tokens came from."""

from headstart.inference.core.verify import BONUS

# Stronger with depth; bonus tokens have none.
SHADES = ("#d9f0d3", "#b8e2b0", "#93d08c", "#6abb6b", "#43a24f", "#1f7d34", "#0f6126")
LIGHT_INK = 6  # from this depth on, letters are white
LEGEND = "draft tokens on green, darker with depth; bonus tokens underlined"


def shade(depth: int) -> int:
    """The number of the shade for a depth, from 1; deeper levels share the last one."""
    return min(depth, len(SHADES))


def token_style(depth: int | None) -> str:
    """How rich writes a token on a terminal; None stands for a token of a step without draft tokens."""
    if depth is None:
        return ""
    if depth == BONUS:
        return "underline"
    return f"{'white' if depth >= LIGHT_INK else 'black'} on {SHADES[shade(depth) - 1]}"

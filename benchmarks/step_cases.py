"""The cases of benchmarks/train_step.py, and the goals for our training step."""

from dataclasses import replace

from peers.contender import Case

SMALL, LONG, LONGEST, LARGE_VOCAB = "2 x 256", "1 x 1024", "1 x 4096", "2 x 256, V 32000"
CASES = {
    SMALL: Case(batch=2, seq=256, vocab=4096, draft_vocab=2048),
    LONG: Case(batch=1, seq=1024, vocab=4096, draft_vocab=2048),
    LONGEST: Case(batch=1, seq=4096, vocab=4096, draft_vocab=2048),
    LARGE_VOCAB: Case(batch=2, seq=256, vocab=32000, draft_vocab=8000),
}
LLAMA3_8B = Case(
    batch=1,
    seq=2048,
    vocab=128256,
    draft_vocab=32000,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    mlp=14336,
    num_layers=32,
    device="cuda",
    dtype="bfloat16",
)
DEVICE_CASES = {f"1 x {seq}": replace(LLAMA3_8B, seq=seq) for seq in (2048, 8192)}
LENGTHS = (1024, 2048, 4096, 8192, 16384)
RIVAL = "specforge"  # the fastest peer on a CPU
SPEED_BARS = {SMALL: 1.0, LARGE_VOCAB: 1.0, LONG: 1.5, LONGEST: 6.0}  # our speed over its, at least
MEMORY_BAR = 0.2  # our memory growth over its at the longest case, at most
LINEAR_BAR = 1.1  # memory growth per token over that at half the length, at most

# DFlash with 128 blocks, the whole vocabulary as usual for it: as speculators trains it by default, and a smaller one.
BLOCK_LONG = Case(
    batch=1,
    seq=1024,
    vocab=4096,
    draft_vocab=4096,
    num_taps=5,
    block_size=16,
    anchors=128,
    head_layers=5,
    to_text=True,
)
BLOCK_CASES = {
    "5 layers, blocks of 16, text": BLOCK_LONG,
    "2 layers, blocks of 8, soft CE": replace(BLOCK_LONG, block_size=8, head_layers=2, to_text=False),
    "5 layers, blocks of 16, half the vocabulary": replace(BLOCK_LONG, draft_vocab=2048),
}
BLOCK_RIVAL = "speculators"
BLOCK_BAR = 0.8  # our CPU seconds over its, at most
BLOCK_LENGTHS = (1024, 2048, 4096, 8192)
TOKENS_PER_BLOCK = 8  # at every length


def block_case(length: int) -> Case:
    """One sequence with a block for every eighth token."""
    return replace(BLOCK_LONG, seq=length, anchors=length // TOKENS_PER_BLOCK)

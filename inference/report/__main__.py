"""Compare decoding methods on the same prompts: speed, acceptance length, and whether the text is the target's own.

    headstart report recipes/tiny.yaml
    headstart report recipes/tiny_full.yaml report.head=assets/demo_head
    headstart report recipes/tiny_full.yaml report.head=assets/demo_head \\
        'report.baselines=[plain, generate, generate_lookup, chain, tree, prompt_lookup, lookahead, early_exit]' \\
        report.prompts=question.jsonl 'report.batches=[1, 4]' 'report.temperatures=[0, 1]'
    headstart report recipes/tiny_full.yaml report.head=assets/demo_head \\
        'report.other_heads={medusa: runs/medusa/head}' decode.depth=4

Every method of report.baselines decodes the same prompts, at each of report.temperatures and in each of
report.batches. Methods alternate prompt by prompt, so that a slow phase of the machine hits all of them.

report.prompts is a JSONL file of questions by category, such as Spec-Bench's, which is reported in its six groups:
download data/spec_bench/question.jsonl from github.com/hemingkexia/Spec-Bench. Later turns of a question are asked too,
each after plain decoding's answer to the one before, so that all methods continue the same text.

An interrupted report goes on where it stopped if recipe, prompts, heads and machine are the same.

The table on the terminal shows, for each method:
  tokens per target step   mean number of tokens that one pass of the target yields (the acceptance length, tau)
  tokens/s                 new tokens per second of wall time, prefill included
  speed-up                 tokens/s over plain decoding's
  same text                prompts whose text equals plain decoding's, token by token
The first prompt's text is printed with its draft tokens coloured.

Writes report.json, report.md, report.png and report.html to RUN_DIR/report, and a searched tree as tree.png. They also
have the speed-up's 95 % interval, the acceptance rate by depth, latencies and distinct tokens.
"""

from headstart.recipes import recipe_from_command_line

if __name__ == "__main__":
    recipe_from_command_line(__doc__)  # --help and mistakes end the process here, before torch is loaded

from headstart.common.errors import CONTINUES
from headstart.inference.report.command import report  # not in this file, which spawned workers do not import
from headstart.recipes import run_command


def main() -> None:
    run_command(__doc__, report, CONTINUES)


if __name__ == "__main__":
    main()

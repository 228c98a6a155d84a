"""The table of bad recipes: whatever is wrong is said before any work, with field, value, allowed and remedy."""

from pathlib import Path

import pytest
from bad_inputs import assert_refused, filled, table, type_command
from tiny_run import build_run

# Overrides of a sound recipe. {folder} holds it and what it names; {long} stands for 5000 characters, {empty} for none.
OVERRIDES = table(r"""
text for a number | train.steps=many
    train.steps | 'many' given | a whole number > 0 is allowed | change it
a quoted number | train.steps='600'
    train.steps | '600' given | a whole number > 0 is allowed | change it
a fraction of a step | train.steps=1.5
    train.steps | 1.5 given | a whole number > 0 is allowed | change it
true for a number | train.steps=true
    train.steps | true given | a whole number > 0 is allowed | change it
nothing for a number | train.steps=
    train.steps | null given | a whole number > 0 is allowed | change it
a list for a number | train.steps=[1]
    train.steps | [1] given | a whole number > 0 is allowed | change it
a mapping for a number | train.steps={a: 1}
    train.steps | {'a': 1} given | a whole number > 0 is allowed | change it
a number for a path | run_dir=7
    run_dir | 7 given | a path is allowed | change it
a list for a path | run_dir=[a]
    run_dir | ['a'] given | a path is allowed | change it
true for a path | data.heldout_prompts=true
    data.heldout_prompts | true given | a path is | change it
yes for a word | log.wandb=yes
    log.wandb | true given | one of auto, online | or leave it out for the default
a number for a word | train.objective=1
    train.objective | 1 given | one of soft_cross | or leave it out for the default
a word in capitals | log.wandb=Online
    log.wandb | 'Online' given | one of auto, online | did you mean
a word with a slip | train.optimizer=muonn
    train.optimizer | 'muonn' given | adamw | did you mean muon?
text for true | target.compile=maybe
    target.compile | 'maybe' given | true or false | change it
1 for true | target.compile=1
    target.compile | 1 given | true or false | default, true
a number for a list | data.temperatures=1
    data.temperatures | 1 given | a list of one or more | or leave it out for the default
text in a list | data.temperatures=[hot]
    data.temperatures | ['hot'] given | a number >= 0 | or leave it out for the default
an empty list | data.temperatures=[]
    data.temperatures | [] given | a list of one or more | or leave it out for the default
null in a list | head.taps=[2, null]
    head.taps | [2, None] given | a whole number >= 0 | or leave it out for the default
a list of fractions | head.taps=[2.5]
    head.taps | [2.5] given | a whole number >= 0 | or leave it out for the default
a list for a mapping | report.other_heads=[a]
    report.other_heads | ['a'] given | names, each | or leave it out for the default
a number for a name | data.prompts=7
    data.prompts | 7 given | a string is allowed | change it
an empty name | target.path=''
    target.path | '' given | one or more characters | change it
a number for a revision | target.revision=1
    target.revision | 1 given | a string, or null | or leave it out for the default
a section that is a number | train=5
    train | 5 given | a section is allowed | write them below
a section that is a list | decode=[1]
    decode | [1] given | a section is allowed | write them below
a section that is text | data=prompts.jsonl
    data | 'prompts.jsonl' given | a section | write them below
no steps | train.steps=0
    train.steps | 0 given | a whole number > 0 is allowed | change it
fewer than no steps | train.steps=-5
    train.steps | -5 given | a whole number > 0 is allowed | change it
no batch | train.batch_size=0
    train.batch_size | 0 given | a whole number > 0 is allowed | default, 8
no prompts | data.num_prompts=0
    data.num_prompts | 0 given | a whole number > 0 is allowed | change it
no learning rate | train.learning_rate=0
    train.learning_rate | 0 given | a number > 0 | or leave it out for the default
a negative rate | train.learning_rate=-1e-4
    train.learning_rate | -0.0001 given | a number > 0 | or leave it out for the default
a rate that is nan | train.learning_rate=.nan
    train.learning_rate | nan given | a number > 0 | or leave it out for the default
an infinite rate | train.learning_rate=.inf
    train.learning_rate | inf given | a number > 0 | or leave it out for the default
a block of one slot | head={kind: block, block_size: 1}
    head.block_size | 1 given | > 1 | or leave it out for the default
no anchors | head={kind: block, block_size: 3} | train.anchors=0
    train.anchors | 0 given | a whole number > 0 is allowed | or leave it out for the default
33 unroll steps | train.unroll=33
    train.unroll | 33 given | <= 32 | or leave it out for the default
a decay above 1 | train.unroll_decay=1.1
    train.unroll_decay | 1.1 given | <= 1 | or leave it out for the default
a negative warm-up | train.warmup_steps=-1
    train.warmup_steps | -1 given | >= 0 | or leave it out for the default
a negative temperature | data.temperatures=[-1]
    data.temperatures | [-1] given | >= 0 | or leave it out for the default
a percentage for a share | train.unroll_decay=95%
    train.unroll_decay | '95%' given | <= 1 | or leave it out for the default
a depth of 65 | decode.depth=65
    decode.depth | 65 given | <= 64 | or leave it out for the default
no nodes | decode.nodes=0
    decode.nodes | 0 given | a whole number > 0 is allowed | or leave it out for the default
a negative tap | head.taps=[-1, 2]
    head.taps | [-1, 2] given | >= 0 | or leave it out for the default
no threads | report.threads=0
    report.threads | 0 given | > 0 and <= 1024 | or leave it out for the default
a million threads | report.threads=1000000
    report.threads | 1000000 given | <= 1024 | or leave it out for the default
no batches | report.batches=[0]
    report.batches | [0] given | > 0 | or leave it out for the default
a seed below 0 | seed=-1
    seed | -1 given | >= 0 and < 2147483648 | or leave it out for the default
a seed above 31 bits | seed=2147483648
    seed | 2147483648 given | < 2147483648 | or leave it out for the default
a number above 64 bits | train.steps=1000000000000000000000000000000
    train.steps | given | 64 bits is allowed | lower it
a shard above 64 bits | data.shard_samples=10000000000000000000000000
    shard_samples | given | 64 bits | lower it
33 Medusa heads | head={kind: medusa, medusa_heads: 33} | train.unroll=32
    medusa_heads | 33 | <= 32 | or leave it out for the default
a million layers | head={kind: block, num_layers: 1000000}
    num_layers | 1000000 | <= 16 | or leave it out for the default
an objective weight below 0 | train.objective_weight=-1
    train.objective_weight | -1 given | allowed | or leave it out for the default
a LoRA rank of 0 | joint.lora_rank=0
    joint.lora_rank | 0 given | a whole number > 0 is allowed | or leave it out for the default
a slip in a key | train.stepz=3
    train.stepz | 3 given | no such key, only steps | did you mean steps?
a key without a section | learning_rate=1
    learning_rate | 1 given | only run_dir | train.learning_rate
a key of another section | train.nodes=3
    train.nodes | 3 given | only steps | did you mean decode.nodes?
a key that is nowhere | train.zzzz=3
    train.zzzz | 3 given | only steps | remove it
a section that is nowhere | trian.steps=3
    trian | given | only run_dir | did you mean train?
a key in capitals | train.Steps=3
    train.Steps | 3 given | only steps | did you mean steps?
a dash for an underscore | train.batch-size=3
    train.batch-size | 3 given | only | batch_size?
a key below a key | train.steps.more=3
    train.steps.more | 3 given | only steps | did you mean steps?
a key of another kind | head.medusa_heads=3
    head.medusa_heads | 3 given | allows only kind | kind medusa
taps of EAGLE-1 | head={kind: eagle1, taps: [2]}
    head.taps | [2] given | only kind | or choose kind eagle3
a kind that is unknown | head.kind=eagle2
    head.kind | 'eagle2' given | one of eagle1, eagle3 | did you mean
no kind | head={}
    head.kind | nothing given | one of eagle1, eagle3, peagle, medusa, block, mtp | add it
an override without a value | train.steps
    train.steps | 'train.steps' given | =value is allowed | example
an override without a key | =3
    '=3' given | =3 | section.key=value is allowed | train.steps=100
an option instead of an override | --steps=3
    --steps=3 | unrecognized | section.key=value | --help
an override that is no YAML | head.taps=[2
    head.taps | '[2' given | YAML is allowed | put it in quotes
a colon in an override | run_dir=a: b: c
    run_dir | 'a: b: c' given | YAML is allowed | put it in quotes
a tab in an override | run_dir=	[a
    run_dir | given | YAML is allowed | put it in quotes
a tag that runs code | run_dir=!!python/name:os.system
    run_dir | given | YAML is allowed | put it in quotes
taps in no order | head.taps=[4, 2]
    head.taps | [4, 2] given | ascending | write [2, 4]
a tap twice | head.taps=[2, 2]
    head.taps | [2, 2] given | without repeats | write [2]
a tap above the target | head.taps=[2, 5]
    head.taps | [2, 5] given | hidden states 0 to 4 | replace 5
a vocabulary above the target's | head.draft_vocab_size=301
    draft_vocab_size | 301 | 1 to the target's 300 | lower it
kv heads that do not divide the target's | head.num_kv_heads=3
    num_kv_heads | 3 given | a divisor of the target's 4 | set head.num_heads
kv heads that do not divide | head.num_heads=6 | head.num_kv_heads=4
    num_kv_heads | 4 given | a divisor of num_heads, 6 | change one
more children than draft tokens | decode.width=81
    decode.width | 81 given | 1 to 80 is allowed | lower it
more children than the target has tokens | head.draft_vocab_size=null | decode.width=301
    decode.width | 301 given | 1 to 300 | lower it
samples longer than the target | data.response_tokens=200
    data.response_tokens | 200 given | up to 104 is allowed | lower one
prompts longer than the target | data.prompt_tokens=500
    data.prompt_tokens | 500 given | up to 116 is allowed | lower one
both longer than the target | data.prompt_tokens=500 | data.response_tokens=500
    data.prompt_tokens | 500 given | fewer than 128 | lower one
texts longer than the target | decode.max_new_tokens=128
    decode.max_new_tokens | 128 given | 1 to 127 | lower it
a draft model that is not named | decode.drafter=draft_model
    decode | draft_model | needs draft_model | give decode.draft_model
costs without a head | decode.drafter=prompt_lookup | decode.growth=cost_aware
    decode | cost_aware | allows chain or dynamic | chain or dynamic
rejection with a dynamic tree | decode.acceptance=rejection
    decode | dynamic | allows growth chain or searched | allows
two writers of responses | data.server=http://x | data.draft_head=head
    data | draft_head | one of states or server, draft_head | remove server
two sources of features | data.states=vllm | data.store=x
    data | store | states is for features that are harvested | remove states
states of vLLM and texts of a draft head | data.states=vllm | data.draft_head=head
    data | draft_head | one of states or server, draft_head | remove states
a store with online mode | data.online=[auto] | data.store=x
    data | online | computes the features | remove store
given responses of the target's own prompts | data.responses=given | data.prompts=self
    data | given | needs conversations | name a file
own prompts held out beside a file | data.heldout_prompts=self
    data | heldout_prompts self | needs prompts self | name a file of prompts
system prompts for the prompts of a file | data.self_system_prompts=[maths]
    data | self_system_prompts | is for prompts self | remove it
an empty system prompt | data.prompts=self | data.self_system_prompts=['']
    data.self_system_prompts | [''] given | a list of one or more | change it
a frozen temperature | data.prompts=self | data.self_temperature=0
    data.self_temperature | 0 given | >= 0.01 | change it
regression of EAGLE-3 | train.regression_weight=1
    train.regression_weight | 1 given | only 0 or null | remove it
unroll beside Medusa heads | head={kind: medusa, medusa_heads: 4}
    train.unroll | 3 given | 4 is allowed | write train.unroll: 4
unroll beside a block | head={kind: block, block_size: 4}
    train.unroll | 3 given | 4 is allowed | write train.unroll: 4
unroll beside a block whose first slot drafts nothing | head={kind: block, block_size: 3, markov_rank: 0}
    train.unroll | 3 given | 2 is allowed | write train.unroll: 2
a depth beyond the block | head={kind: block, block_size: 3} | decode.depth=4
    decode.depth | 4 given | 1 to 3 | raise head.block_size
a mask token beyond the vocabulary | head={kind: block, block_size: 3, mask_token_id: 5000}
    head.mask_token_id | 5000 given | 0 to | null for its last
input noise for a block head | head={kind: block, block_size: 3} | train.input_noise=0.1
    train.input_noise | 0.1 given | only 0 or null | remove it
blocks for EAGLE-3 | train.anchors=5
    train.anchors | 5 given | no value is allowed | choose head.kind block
a fitted start of a trained head | train.start_from=runs/other/head | train.fitted_start=true
    train.fitted_start | true given | only false | remove one of them
a fitted start of a head whose start is not fitted | head={kind: eagle1} | train.fitted_start=true
    train.fitted_start | true given | only false is allowed with head.kind eagle1 | remove it
a depth beyond the Medusa heads | head={kind: medusa, medusa_heads: 3} | decode.depth=4
    decode.depth | 4 given | 1 to 3 | lower it
joint training of EAGLE-3 | joint.mode=full
    joint.mode | 'full' given | only null is allowed | choose head.kind medusa
online with a shared target | data.online=[auto] | target.split=tensor
    target.split | 'tensor' given | only layers or null | remove split
other heads without their rows | report.baselines=[plain] | report.other_heads={a: b}
    report.baselines | ['plain'] given | chain, tree, cost_aware or repeats | add one
a cost-aware row with rejection | report.baselines=[cost_aware] | decode.acceptance=rejection | decode.growth=chain
    report.baselines | ['cost_aware'] given | only rows other than cost_aware | remove cost_aware
a row of repeats without repeats | report.baselines=[repeats] | decode.repeats=0
    decode.repeats | 0 given | 1 to 64 is allowed, because report.baselines has repeats | add it, or remove
an assistant that is not named | report.baselines=[generate_assisted]
    decode.draft_model | nothing given | a path is allowed | add it, or remove
a row that is unknown | report.baselines=[plane]
    report.baselines | ['plane'] given | one of plain, generate | change it
a device called gpu | target.device=gpu
    target.device | 'gpu' given | auto, cpu, cuda | did you mean cuda?
a device in capitals | target.device=CUDA
    target.device | 'CUDA' given | auto, cpu, cuda | did you mean cuda?
a device without a number | target.device='cuda:'
    target.device | 'cuda:' given | auto, cpu, cuda | did you mean cuda?
a device that is nonsense | target.device=fast
    target.device | 'fast' given | auto, cpu, cuda | choose one
a device that is a number | target.device=0
    target.device | 0 given | allowed | or leave it out for the default
an online device called gpu | data.online=[gpu]
    data.online | ['gpu'] given | auto, cpu, cuda | did you mean cuda?
a row twice | report.baselines=[plain, tree, plain]
    report.baselines | given | without repeats is allowed | write ['plain', 'tree']
a batch size twice | report.batches=[1, 1]
    report.batches | [1, 1] given | without repeats | write [1]
a temperature twice | report.temperatures=[0, 0.0]
    report.temperatures | [0, 0.0] given | without repeats | write [0.0]
a head without a name | report.other_heads={'': head}
    report.other_heads | given | names, each with a path | change it
a server without http | data.server=localhost:8000
    data.server | 'localhost:8000' given | http:// or https:// | write http://localhost:8000
a server twice | data.server=[http://x, http://x]
    data.server | given | a list without repeats is allowed | write ['http://x']
one of the servers without http | data.server=[http://x, y:8000]
    data.server | given | http:// or https:// | write http://y:8000
another engine's states | data.states=sglang
    data.states | 'sglang' given | vllm | change it
a server that is empty | data.server=''
    data.server | '' given | http:// or https:// | write http://HOST:PORT
a hub dataset without a name | data.prompts='hf:'
    data.prompts | 'hf:' given | hf:org/name:split is allowed | correct the name
a hub dataset with a space | data.prompts='hf:my data'
    data.prompts | 'hf:my data' given | hf:org/name:split | correct the name
prompts that are not there | data.prompts=gone.jsonl
    data.prompts | 'gone.jsonl' given | an existing file | put the prompts there
held-out prompts that are not there | data.heldout_prompts=gone.jsonl
    data.heldout_prompts | 'gone.jsonl' given | an existing file, or self with data.prompts self, is
    put the prompts there
held-out prompts that are a folder | data.heldout_prompts=.
    data.heldout_prompts | '.' given | an existing file, or self with data.prompts self, is | put the prompts there
a target that is not there | target.path=./gone
    target.path | './gone' given | config.json | put the model there
a target without a model | target.path={folder}/target/not_a_model
    target.path | not_a_model' given | config.json | put the model there
a target that is a file | target.path={folder}/one.jsonl
    target.path | one.jsonl' given | config.json | put the model there
an empty target path | target.path=''
    target.path | '' given | a path of one or more characters | change it
an empty run_dir | run_dir=''
    run_dir | '' given | a path of one or more characters | change it
a run_dir of spaces | run_dir='  '
    run_dir | '  ' given | a path of one or more characters | change it
a run_dir with a null byte | run_dir="a\0b"
    run_dir | 'a\x00b' given | a path | change it
a run_dir that is a file | run_dir={folder}/one.jsonl
    run_dir | one.jsonl' given | a folder | choose another
a run_dir below a file | run_dir={folder}/one.jsonl/x
    run_dir | one.jsonl/x' given | is a file | choose another
a data.folder that is a file | data.folder={folder}/one.jsonl
    data.folder | one.jsonl' given | is a file | choose another
a path of 5000 characters | run_dir={long}
    run_dir | given | up to 255 bytes is allowed | choose another
prompts with a path of 5000 characters | data.prompts={long}
    data.prompts | given | an existing file | put the prompts there
""")

# What is typed after `headstart train`.
COMMANDS = table("""
no recipe
    headstart train | required: recipe | a recipe and then section.key=value | --help lists
a recipe that is not there | gone.yaml
    gone.yaml | No such file | the path of a recipe | give the path
a folder for a recipe | {folder}
    {folder} | Is a directory | the path of a recipe | give the path
an empty name for a recipe | {empty}
    : | Is a directory | the path of a recipe | give the path
prompts for a recipe | {folder}/one.jsonl
    one.jsonl | given, but there is no such key | only run_dir | remove it
a model for a recipe | {folder}/target/model.safetensors
    model.safetensors | not YAML | utf-8 | fix the file
an override first | train.steps=3
    train.steps=3 | No such file | the path of a recipe | give the path
two recipes | {folder}/recipe.yaml | {folder}/recipe.yaml
    recipe.yaml | given | section.key=value is | example
spaces around the sign | {folder}/recipe.yaml | train.steps | = | 3
    train.steps | given | =value is | example
an unknown option | {folder}/recipe.yaml | --fast
    --fast | unrecognized | section.key=value | --help lists
a file that cannot be opened | /proc/1/mem
    /proc/1/mem | give the path of a recipe
""")

LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (name, name, *[name - 1] * 9)
    for name in range(98, 107)
)
NOT_YAML = "recipe.yaml | not YAML | fix the file there"
NO_RECIPE = "recipe.yaml | not a recipe | sections | `key: value` lines"
FILES: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "run_dir | nothing given | a path is allowed | add it"),
    "only comments": (b"# nothing\n", "target | nothing given | a section is allowed | write them below"),
    "a list": (b"- run_dir\n", NO_RECIPE),
    "one word": (b"tiny\n", NO_RECIPE),
    "one number": (b"7\n", NO_RECIPE),
    "prose": (b"# Results\n\nThe head: it is fast. See: docs\n", f"{NOT_YAML} | line 3"),
    "an image": (b"\x89PNG\r\n\x1a\n\x00\x00", f"{NOT_YAML} | utf-8"),
    "a null byte": (b"run_dir: a\x00b\n", f"{NOT_YAML} | not allowed"),
    "UTF-16": ("run_dir: runs".encode("utf-16"), f"{NOT_YAML} | utf-8"),
    "Latin-1": (b"run_dir: caf\xe9\n", f"{NOT_YAML} | utf-8"),
    "tabs": (b"train:\n\tsteps: 3\n", f"{NOT_YAML} | line 2"),
    "an open quote": (b"run_dir: 'runs\ntrain: 1\n", f"{NOT_YAML} | line"),
    "an open list": (b"head: {taps: [2\n", f"{NOT_YAML} | line"),
    "wrong indentation": (b"train:\n  steps: 3\n   unroll: 2\n", f"{NOT_YAML} | line 3"),
    "an unknown anchor": (b"run_dir: *runs\n", f"{NOT_YAML} | line 1"),
    "two documents": (
        b"run_dir: a\n---\nrun_dir: b\n",
        "recipe.yaml | line 2 | found another document | fix the file there",
    ),
    "a tag that runs code": (b"run_dir: !!python/object/apply:os.getcwd []\n", "recipe.yaml | line 1 | not YAML | fix"),
    "a list that holds itself": (
        b"run_dir: &a [*a]\n",
        "run_dir | [[[[[...]]]]] given | a path is allowed | change it",
    ),
    "a mapping that holds itself": (
        b"train: &t\n  steps: *t\n",
        "train.steps | given | a whole number > 0 | change it",
    ),
    "a key that is a list": (b"? [1, 2]\n: 3\n", f"{NOT_YAML} | line 1"),
    "brackets without end": (b"run_dir: " + b"[" * 500, f"{NOT_YAML} | nested"),
    "a number of 5000 digits": (b"seed: " + b"9" * 5000, f"{NOT_YAML} | 4300 digits"),
    "a billion laughs": (LAUGHS, "a:  | given | but there is no such key, only run_dir | remove it"),
    "a key twice": (b"run_dir: a\nrun_dir: b\n", "run_dir: given in line 1 | in line 2 | once is allowed | remove one"),
    "a section twice": (
        b"train:\n  steps: 1\ntrain:\n  unroll: 1\n",
        "train: given in line 1 | line 3 | once is allowed | remove one",
    ),
    "a key twice in a section": (
        b"train:\n  steps: 1\n  steps: 2\n",
        "train.steps: given in line 2 | line 3 | once | remove one",
    ),
    "a number for a key": (b"7: 1\n", "7: 1 given | line 1 | no such key, only run_dir | remove it"),
    "null for a key": (b"~: 1\n", "None: 1 given | 1 given | no such key, only run_dir | remove it"),
    "true for a key": (b"on: 1\n", "True: 1 given | 1 given | no such key, only run_dir | remove it"),
    "keys without a section": (b"steps: 3\n", "steps: 3 given | line 1 | only run_dir | did you mean train.steps?"),
    "no colon": (b"run_dir runs/tiny\n", NO_RECIPE),
    "no space after the colon": (b"run_dir:runs/tiny\n", NO_RECIPE),
    "a time for a number": (b"train:\n  steps: 1:30\n", "train.steps | '1:30' given | a whole number > 0 | change it"),
    "an octal number": (b"train:\n  steps: 010\n", "train.steps | '010' given | a whole number > 0 | change it"),
    "JSON lines": (b'{"prompt": "a"}\n{"prompt": "b"}\n', f"{NOT_YAML} | line 2"),
}
CONFIGS: dict[str, tuple[bytes, str]] = {
    "an empty config.json": (b"", "target.path | target' given | a readable config.json | fix the file"),
    "a config.json of prose": (b"llama", "target.path | target' given | a readable config.json | fix the file"),
    "a config.json that is a list": (b"[]", "target.path | target' given | a JSON object is allowed | give the folder"),
    "a config.json in Latin-1": (
        b'{"a": "\xe9"}',
        "target.path | target' given | a readable config.json | fix the file",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound recipe, and everything that it names."""
    folder = tmp_path_factory.mktemp("recipes")
    build_run(folder)
    (folder / "empty.jsonl").write_text("")
    (folder / "one.jsonl").write_text('{"prompt": "import os"}\n')
    (folder / "target" / "not_a_model").mkdir()
    return folder


@pytest.mark.parametrize("case", [*OVERRIDES, *COMMANDS])
def test_a_bad_value_is_refused_before_any_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    given, facts = (OVERRIDES | COMMANDS)[case]
    recipe = ["{folder}/recipe.yaml"] if case in OVERRIDES else []
    words = [filled(word, folder=folder, long="a" * 5000, empty="") for word in recipe + given]
    outcome = type_command(["train", *words], monkeypatch, capsys)
    assert_refused(outcome, filled(facts, folder=folder))
    assert outcome.code == 2
    assert not (folder / "run").exists()


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_is_no_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, facts = FILES[case]
    (tmp_path / "recipe.yaml").write_bytes(content)
    outcome = type_command(["report", str(tmp_path / "recipe.yaml")], monkeypatch, capsys)
    assert_refused(outcome, facts)
    assert outcome.code == 2
    assert len(outcome.text) < 20_000


@pytest.mark.parametrize("case", CONFIGS)
def test_a_target_without_a_readable_config_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    content, facts = CONFIGS[case]
    build_run(tmp_path)
    (tmp_path / "target/config.json").write_bytes(content)
    outcome = type_command(["train", str(tmp_path / "recipe.yaml")], monkeypatch, capsys)
    assert_refused(outcome, facts)
    assert outcome.code == 2

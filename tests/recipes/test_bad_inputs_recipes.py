"""Whatever is wrong with a recipe is said before any work: field, value, what is allowed, and what to do."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_inputs import Typed, assert_refused, filled
from tiny_run import build_run

from headstart.recipes import RecipeError, load_recipe
from headstart.recipes.fields import head_kinds, recipe_fields, recipe_sections, section_keys

# Overrides of a sound recipe, joined by " | "; the field at fault is that of the first, or stands before " <- ".
# {folder} holds the recipe and what it names; {long} stands for 5000 characters.
OVERRIDES = """
data.temperatures=[]
train=5
head <- head=null
train.unroll_decay=95%
train.stepz=3
learning_rate=1
train.nodes=3
train.batch-size=3
head.medusa_heads=3
head.num_head <- head={kind: eagle1, num_head: 2}
 <- =3
run_dir=a: b: c
run_dir=!!python/name:os.system
head.taps=[2, 5]
head.num_kv_heads=4 | head.num_heads=6
decode.width=301 | head.draft_vocab_size=null
decode <- decode.growth=cost_aware | decode.drafter=prompt_lookup
decode <- decode.repeats=4 | decode.drafter=prompt_lookup
data.states=vllm | data.store=x
data.online=[auto, cpu]
data.heldout_prompts=self
data.self_system_prompts=[maths]
data.self_pictures=shown
data.self_pictures=shown | data.prompts=self | data.server=http://x
data.self_system_prompts=[''] | data.prompts=self
train.unroll <- head={kind: block, block_size: 3, markov_rank: 0}
decode.depth=4 | head={kind: block, block_size: 3}
head.mask_token_id <- head={kind: block, block_size: 3, mask_token_id: 5000} | train.unroll=3
train.anchors=5
train.fitted_start=true | train.start_from=runs/other/head
train.fitted_start=true | head={kind: eagle1}
joint.mode=full
joint.mode=lora | head={kind: eagle1}
head.draft_vocab_size <- head={kind: medusa, medusa_heads: 2, draft_vocab_size: 80} | train.unroll=2 | joint.mode=lora
train.pack_tokens=64 | head={kind: medusa, medusa_heads: 3} | joint.mode=full
report.baselines=[plain] | report.other_heads={a: b}
decode.repeats=0 | report.baselines=[repeats]
decode.draft_model <- report.baselines=[generate_assisted]
report.baselines=[plane]
report.baselines=[plain, tree, plain]
data.server=localhost:8000
data.prompts='hf:'
data.heldout_prompts=.
data.folder=s3://user:password@bucket/data
target.path=gone.gguf
target.path={folder}/target/not_a_model
train.learning_rate=.nan
train.steps
trian <- trian.steps=3
head.kind=eagle2
head.kind <- head={}
head.taps=[4, 2]
head.draft_vocab_size=301
data.response_tokens=200
decode.max_new_tokens=128
decode <- decode.drafter=draft_model
data.draft_head=head | data.server=http://x
data.online=[auto] | data.store=x
data.responses=given | data.prompts=self
target.split=tensor | data.online=[auto]
target.device=gpu
data.prompts=gone.jsonl
target.path=''
target.chat_template_kwargs={date: tomorrow}
run_dir='  '
run_dir={folder}/one.jsonl/x
run_dir={long}
""".strip("\n").splitlines()

LAUGHS = b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"%c: &%c [*%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c, *%c]\n" % (name, name, *[name - 1] * 9)
    for name in range(98, 107)
)
# The content of a file that is not a recipe -> fragments of the message.
FILES: dict[bytes, str] = {
    b"": "run_dir: nothing given | a path is allowed | add it",
    b"# nothing\n": "target: nothing given | a section is allowed | write them below",
    b"- run_dir\n": "not a recipe | sections",
    b"\x89PNG\r\n\x1a\n\x00\x00": "not YAML | utf-8",
    b"run_dir: a\x00b\n": "not YAML | not allowed",
    b"train:\n\tsteps: 3\n": "not YAML | line 2",
    b"run_dir: a\n---\nrun_dir: b\n": "not YAML | line 2 | another document",
    b"run_dir: !!python/object/apply:os.getcwd []\n": "not YAML | line 1",
    b"run_dir: &a [*a]\n": "run_dir: [[[[[[[...]]]]]]] given | a path is allowed | change it",
    b"train: &t\n  steps: *t\n": "train.steps: | given | a whole number > 0 | change it",
    b"run_dir: " + b"[" * 500: "not YAML | recursion",
    b"seed: " + b"9" * 5000: "not YAML | 4300 digits",
    LAUGHS: "a: | given, but there is no such key, only run_dir | remove it",
    b"run_dir: a\nrun_dir: b\n": "run_dir: given in line 1 | in line 2 | once is allowed | remove one",
    b"train:\n  steps: 1\n  steps: 2\n": "train.steps: given in line 2 | line 3 | once | remove one",
    b"on: 1\n": "on: 1 given | no such key, only run_dir | remove it",
    b"train:\n  steps: 1:30\n": "train.steps: '1:30' given | a whole number > 0 | change it",
}
CONFIGS = {
    b"llama": "a readable config.json is allowed; fix the file",
    b"[]": "a readable config.json is allowed; fix the file (it is not a JSON object)",
    b'{"a": "\xe9"}': "a readable config.json is allowed; fix the file",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_run(tmp_path_factory.mktemp("recipes")).parent
    (folder / "one.jsonl").write_text('{"prompt": "import os"}\n')
    (folder / "target" / "not_a_model").mkdir()
    return folder


def assert_names(field: str, message: str) -> None:
    """One line of the message has the field, its value, what is allowed, and what to do; no mistake is told twice."""
    lines = [line.strip() for line in message.splitlines()[1:]]
    law = re.compile(rf"{re.escape(field)}: .+ given, .*(allowed|allows|need|is for).*; .+")
    assert sum(law.match(line) is not None for line in lines) == 1, message


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_bad_override_is_refused_before_any_work(folder: Path, typed: Typed, case: str) -> None:
    field, arrow, overrides = case.rpartition(" <- ")
    field = field if arrow else overrides.partition("=")[0]
    outcome = typed("train", folder / "recipe.yaml", *filled(overrides, folder=folder, long="a" * 5000).split(" | "))
    assert outcome.code == 2
    assert "Traceback" not in outcome.text
    assert "user:password" not in outcome.text
    assert_names(field, outcome.err)
    assert not (folder / "run").exists()


def overrides_of(path: str, value: str) -> list[str]:
    """Overrides that give a field this value, in the first kind of its section that has it."""
    section, _, key = path.rpartition(".")
    if section != "head" or key == "kind":
        return [f"{path}={value}"]
    kind = next(kind for kind in head_kinds() if key in section_keys("head", kind))
    return [f"head={{kind: {kind}}}", f"{path}={value}"]


def values_outside(path: str) -> Iterator[str]:
    """A value of another type, and one beyond each bound."""
    yield "[[7.5]]"
    allowed = recipe_fields()[path].allowed
    is_list = allowed.startswith("a list")
    for sign, bound in re.findall(r"([<>]=?) ([-\d.e]+)", allowed):
        number = float(bound) + {">": 0, "<": 0, ">=": -1, "<=": 1}[sign]
        text = f"{number:.0f}" if "whole" in allowed else str(number)
        yield f"[{text}]" if is_list else text


@pytest.mark.parametrize("section", ["", *recipe_sections()])
def test_every_field_refuses_another_type_and_what_is_beyond_its_bounds(folder: Path, section: str) -> None:
    paths = [path for path in recipe_fields() if path.rpartition(".")[0] == section]
    assert paths
    for path, value in ((name, value) for name in paths for value in values_outside(name)):
        with pytest.raises(RecipeError) as error:
            load_recipe(folder / "recipe.yaml", overrides_of(path, value))
        assert_names(path, str(error.value))


@pytest.mark.parametrize("content", FILES)
def test_a_file_that_is_not_a_recipe_is_refused(tmp_path: Path, typed: Typed, content: bytes) -> None:
    (tmp_path / "recipe.yaml").write_bytes(content)
    outcome = typed("train", tmp_path / "recipe.yaml")
    assert outcome.code == 2
    assert len(outcome.text) < 20_000
    assert_refused(outcome, FILES[content])


@pytest.mark.parametrize("content", CONFIGS)
def test_a_target_without_a_readable_config_is_refused(tmp_path: Path, typed: Typed, content: bytes) -> None:
    build_run(tmp_path)
    (tmp_path / "target/config.json").write_bytes(content)
    outcome = typed("train", tmp_path / "recipe.yaml")
    assert outcome.code == 2
    assert CONFIGS[content] in outcome.err
    assert_names("target.path", outcome.err)

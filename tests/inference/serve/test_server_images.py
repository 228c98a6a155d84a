"""Laws of requests with pictures: their texts are those of transformers, and nothing is read that was not allowed."""

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from completion_server import Server, serving
from openai import OpenAI
from seeing_target import PLACE, data_url, file_bytes, picture, text
from server_run import NAME, Running, running, without
from test_server_refused import assert_refused
from transformers import AutoModelForImageTextToText

from headstart.inference.drafters.growth import Growth
from headstart.inference.drafters.lookup import Lookup
from headstart.inference.engine.loop import DecodeLoop
from headstart.inference.generate.defaults import TargetDefaults
from headstart.inference.images.prompts import ImagePrompts, image_prompts
from headstart.inference.serve.command import load
from headstart.inference.serve.options import ServerSettings, serve_options
from headstart.inference.serve.service import Served
from headstart.inference.targets.chat_template import ChatTemplate
from headstart.inference.targets.model import TargetModel
from headstart.inference.targets.tokenizer import visible_text_of
from headstart.recipes.schema import TargetSection

CHAT, NEW = "/v1/chat/completions", 8
Part = dict[str, Any]


@pytest.fixture(scope="module")
def seeing(seeing_folder: Path) -> Served:
    section = TargetSection(path=str(seeing_folder), dtype="float32", device="cpu")
    target, template = TargetModel.load(section, ()), ChatTemplate.of(section)
    return Served(
        target=target,
        template=template,
        make_loop=partial(DecodeLoop, target, Lookup(Growth(4, 2, 8), ngram=1), max_batch=4, prefix_memory=10**8),
        defaults=TargetDefaults.of(target),
        max_depth=4,
        about={"target": NAME, "head": None, "drafter": "prompt_lookup", "images": True},
        thread=ThreadPoolExecutor(1),
        images=image_prompts(section, template, target),
    )


@pytest.fixture(scope="module")
def server(seeing: Served) -> Iterator[Running]:
    with running(seeing, ServerSettings((NAME,), max_batch=4)) as started:
        yield started


@pytest.fixture(scope="module")
def written(seeing_folder: Path, seeing: Served) -> Any:
    """What transformers writes after messages: its text, and the numbers of tokens."""
    model: Any = AutoModelForImageTextToText.from_pretrained(seeing_folder).eval()
    assert isinstance(seeing.images, ImagePrompts)
    processor: Any = seeing.images.processor

    def write(messages: list[dict[str, Any]]) -> tuple[str, int, int]:
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
        encoded = processor.apply_chat_template(messages, **options)
        count = encoded["input_ids"].shape[1]
        new = model.generate(**encoded, max_new_tokens=NEW, do_sample=False)[0, count:].tolist()
        return visible_text_of(seeing.tokenizer, without(new, seeing.target.end_tokens)), count, len(new)

    return write


def shown(colour: str, form: str = "PNG", **place: int) -> Part:
    return {"type": "image_url", "image_url": {"url": data_url(picture(colour, **place), form)}}


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello"}],
    *([{"role": "user", "content": [shown(colour), text("which colour")]}] for colour in ("red", "blue")),
    [{"role": "user", "content": [text("look"), shown("red", row=1), text("and"), shown("blue", cells=3)]}],
    [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [shown("yellow", column=1), text("which")]},
        {"role": "assistant", "content": "yellow"},
        {"role": "user", "content": [text("and this"), shown("green")]},
    ],
]


def ask(server: Running, messages: list[dict[str, Any]], **more: Any) -> Any:
    return server.http.post(CHAT, json={"messages": messages, "max_tokens": NEW, "temperature": 0, **more})


def test_texts_and_counts_are_those_of_transformers(server: Running, written: Any) -> None:
    wanted = [written(messages) for messages in CONVERSATIONS]
    assert len({each[0] for each in wanted}) > 2
    with ThreadPoolExecutor(4) as threads:
        answers = [each.json() for each in threads.map(partial(ask, server), [*CONVERSATIONS, *CONVERSATIONS[-2:]])]
    texts, usages = [each["choices"][0]["message"]["content"] for each in answers], [each["usage"] for each in answers]
    counts = [(each["prompt_tokens"], each["completion_tokens"]) for each in usages]
    assert [*zip(texts, counts, strict=True)] == [(text, tuple(most)) for text, *most in [*wanted, *wanted[-2:]]]
    assert sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers[len(wanted) :]) > 0
    for messages, (_, count, _) in zip(CONVERSATIONS, wanted, strict=True):
        assert server.http.post("/tokenize", json={"messages": messages}).json()["count"] == count


def test_clients_of_openai_send_pictures(server: Running, written: Any) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = CONVERSATIONS[-1]
    fields: Any = {"model": NAME, "messages": messages, "max_tokens": NEW, "temperature": 0}
    chunks: Any = client.chat.completions.create(**fields, stream=True, n=2)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [written(messages)[0]] * 2

    def item(part: Part) -> Part:
        if part["type"] == "text":
            return {"type": "input_text", "text": part["text"]}
        return {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}

    parts = [each["content"] if isinstance(each["content"], list) else [text(each["content"])] for each in messages]
    items: Any = [{**each, "content": [*map(item, own)]} for each, own in zip(messages, parts, strict=True)]
    response = client.responses.create(model=NAME, input=items, max_output_tokens=NEW, temperature=0)
    assert response.output_text == written(messages)[0]


def test_what_a_server_does_not_read_is_refused_by_name(server: Running, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(file_bytes(picture()))
    local, place = str(tmp_path / "red.png"), "messages[0].content[0]"
    refused: list[tuple[Any, str, str]] = [
        ({"image_url": f"file://{local}"}, f"{place}.image_url: ", "a data URL"),
        ({"image_url": {"url": f"{server.url}/style.css"}}, f"{place}.image_url.url: ", "a data URL"),
        ({"path": local}, f"{place}.path: ", "a data URL"),
        ({"image_url": {"url": data_url(b"x" * 9)}}, f"{place}.image_url.url: ", "unreadable"),
        ({"type": "input_audio"}, f"{place}.type: 'input_audio'", "text, image_url or image"),
    ]
    for part, beginning, fact in refused:
        answer = ask(server, [{"role": "user", "content": [{"type": "image_url", **part}]}])
        assert assert_refused(answer, 400, fact).startswith(beginning)
        assert answer.json()["error"]["param"] == beginning.partition(": ")[0]
    mark = [{"role": "user", "content": [shown("red"), text(PLACE)]}]
    assert assert_refused(ask(server, mark), 400, PLACE).startswith("messages[0].content[1].text: ")
    assert assert_refused(ask(server, mark[:1], add_special_tokens=True), 400).startswith("add_special_tokens: True")
    long = [{"role": "user", "content": [shown("red", cells=4)] * 16}]
    assert assert_refused(ask(server, long), 400, "256 positions")
    assert ask(server, CONVERSATIONS[1]).status_code == 200


def test_pictures_are_fetched_only_from_hosts_that_were_allowed(seeing: Served, written: Any) -> None:
    class Site(Server):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(file_bytes(picture("blue")))

    settings = ServerSettings((NAME,), max_batch=4, image_hosts=frozenset({"127.0.0.1"}))
    with serving(Site) as (site, _), running(seeing, settings) as started:

        def of(host: str) -> Any:
            link = {"type": "image_url", "image_url": {"url": f"{site.replace('127.0.0.1', host)}/blue.png"}}
            return ask(started, [{"role": "user", "content": [link]}])

        wanted = written([{"role": "user", "content": [shown("blue")]}])[0]
        assert of("127.0.0.1").json()["choices"][0]["message"]["content"] == wanted
        assert_refused(of("localhost"), 400, "an address at 127.0.0.1")


def test_a_target_whose_images_are_refused_still_writes_text(seeing: Served, written: Any) -> None:
    reason = "the target's passes after images differ"
    with running(replace(seeing, images=reason), ServerSettings((NAME,), max_batch=4)) as started:
        said = assert_refused(ask(started, CONVERSATIONS[1]), 400, f"only text ({reason}) is allowed")
        assert said.startswith("messages[0].content[0].type: 'image_url' given")
        assert ask(started, CONVERSATIONS[0]).json()["choices"][0]["message"]["content"] == written(CONVERSATIONS[0])[0]


def test_the_start_says_whether_images_are_read(seeing_folder, tmp_path, capsys) -> None:
    shutil.copytree(seeing_folder, tmp_path / "target")
    for said in ("images are read", "images are refused: .*target: no processor reads pictures"):
        options = serve_options(None, ["--target", str(tmp_path / "target"), "--dtype", "float32", "--always-draft"])
        served = load(options, ThreadPoolExecutor(1))
        assert re.search(f"target: {said}", capsys.readouterr().out)
        assert served.about["images"] == isinstance(served.images, ImagePrompts) == (said == "images are read")
        (tmp_path / "target" / "preprocessor_config.json").unlink(missing_ok=True)

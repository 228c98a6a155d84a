"""Laws of pictures that cannot be read or may not be: the message names the place, the value, what is allowed and what
to do; and of the others: what a target sees of them."""

import base64
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from completion_server import Server, serving
from PIL import Image
from seeing_target import COLOURS, data_url, file_bytes, picture

from headstart.inference.images import pictures
from headstart.inference.images.pictures import Sources, read_pictures

RED = COLOURS["red"]
FRAMES = [picture(colour) for colour in COLOURS]


def message(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "y"}, *parts]}]


def image_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def read_one(part: Any, sources: Sources = Sources()) -> Image.Image:  # noqa: B008
    turns, (found,) = read_pictures(message(part), sources)
    assert turns[1]["content"] == [{"type": "text", "text": "y"}, {"type": "image"}]
    assert found.mode == "RGB"
    image: Image.Image = found
    return image


def animation(form: str) -> str:
    return data_url(file_bytes(FRAMES[0], form, save_all=True, append_images=FRAMES[1:]))


def bomb(width: int, height: int) -> str:
    """A small PNG whose header promises many pixels; decoding it would fail."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return data_url(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT")


PNG = file_bytes(picture())
LINK = "http://127.0.0.1:1/x.png"
# A part, the place in the message, and what else it says.
REFUSED: list[tuple[Any, str, tuple[str, ...]]] = [
    ({"type": "image"}, "messages[1].content[1]: ", ("image_url or image", "add the picture")),
    (image_url(None), ".image_url.url: None given", ("a data URL",)),
    (image_url(5), ".image_url.url: 5 given", ("a data URL",)),
    (image_url(""), ".image_url.url: '' given", ("a data URL",)),
    (image_url("/etc/passwd"), ".image_url.url: '/etc/passwd' given", ("a data URL", "send the picture itself")),
    (image_url("file:///etc/passwd"), ".url: 'file:///etc/passwd' given", ("a data URL",)),
    ({"type": "image", "path": "/etc/passwd"}, ".path: '/etc/passwd' given", ("a data URL",)),
    ({"type": "image", "image": Path("/etc/passwd")}, ".image: ", ("a data URL",)),
    ({"type": "image", "image": {"path": "/etc/passwd", "bytes": None}}, ".image: '/etc", ("a data URL",)),
    ({"type": "image", "base64": 5}, ".base64: ", ("base64 is allowed",)),
    (image_url("http://["), ".url: 'http://['", ("a data URL",)),
    (image_url(LINK), f".url: '{LINK}' given", ("a data URL",)),
    (image_url("HTTPS://user@127.0.0.1/x"), ".url: 'HTTPS://", ("a data URL",)),
    (image_url("ftp://127.0.0.1/x"), ".url: 'ftp://", ("a data URL",)),
    (image_url("data:image/png;base64,"), ".url: 'data:image/png;base64,' (empty)", ("PNG, JPEG",)),
    (image_url("data:image/png;base64,@@"), ".url: ", ("base64 is allowed",)),
    (image_url("data:image/png,abc"), ".url: ", ("data:image/png;base64,...",)),
    (image_url("data:video/mp4;base64,AAAA"), ".url: ", ("data:image/png;base64,...",)),
    (image_url(data_url(b"hello")), ".url: ", ("unreadable", "PNG, JPEG", "send the whole file")),
    (image_url(data_url(PNG[: len(PNG) // 2])), ".url: ", ("truncated",)),
    (image_url(data_url(picture(), "TIFF")), ".url: ", ("unreadable", "PNG, JPEG")),
    (image_url(bomb(30_000, 30_000)), ".url: ", ("more than 178 million pixels", "at most 64,000,000")),
    (image_url(bomb(9_000, 9_000)), ".url: ", ("9000 x 9000 pixels", "at most 64,000,000", "send smaller")),
    *((image_url(animation(form)), ".url: ", ("an animation", "a single picture")) for form in ("GIF", "WEBP", "PNG")),
    (image_url(data_url(file_bytes(Image.new("I;16", (4, 4))))), ".url: ", ("8 bits a channel", "I;16")),
    ({"type": "video_url", "video_url": {"url": "x"}}, ".type: 'video_url' given", ("image_url", "leave the part out")),
    ({"type": "input_audio", "input_audio": {}}, ".type: 'input_audio' given", ("text, image_url or image",)),
    ("x", ".type: None given", ("text, image_url or image",)),
    ({"type": "text"}, ".text: None given", ("a text is allowed",)),
]


@pytest.mark.parametrize(("part", "place", "facts"), REFUSED)
def test_a_picture_is_refused_by_name(part: Any, place: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="allowed; ") as told:
        read_pictures(message(part), Sources())
    said = str(told.value)
    assert said.startswith("messages[1].content[1]")
    assert place in said
    assert not [fact for fact in facts if fact not in said], said
    assert len(said) < 400


def test_limits_count_all_pictures_and_where_none_are_read_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    part = image_url(data_url(picture()))
    with pytest.raises(ValueError, match=r"content\[65\].image_url.url: picture 65 .* 64 are allowed"):
        read_pictures(message(*[part] * 65), Sources())
    monkeypatch.setattr(pictures, "PIXELS_MAX", 600)
    assert len(read_pictures(message(part, part), Sources())[1]) == 2
    with pytest.raises(ValueError, match=r"content\[3\].image_url.url: .* 16 x 16 pixels .* at most 88 more"):
        read_pictures(message(part, part, part), Sources())
    monkeypatch.setattr(pictures, "BYTES_MAX", 50)
    with pytest.raises(ValueError, match=r"bytes given, at most 50 are"):
        read_pictures(message(part), Sources())
    for part in (image_url("/etc/passwd"), {"type": "image", "image": 5}):
        with pytest.raises(ValueError, match=r"content\[1\].type: 'image.* given, only text \(it is blind\) is"):
            read_pictures(message(part), Sources(Path("/"), refused="it is blind"))


def test_every_layout_gives_the_same_picture(tmp_path: Path) -> None:
    (tmp_path / "red one.png").write_bytes(PNG)
    url, files = data_url(PNG), Sources(tmp_path)
    parts = [{"type": "image", "image": each} for each in (url, PNG, {"bytes": PNG, "path": None}, picture())]
    parts += [image_url(url), {"type": "image_url", "image_url": url, "detail": "high"}]
    parts += [{"type": "input_image", "image_url": url}, {"type": "image", "url": url}]
    for part in [*parts, {"type": "image", "base64": base64.b64encode(PNG).decode()}]:
        assert read_one(part).tobytes() == picture().tobytes()
    for name in ("red one.png", tmp_path / "red one.png", f"file://{tmp_path}/red%20one.png"):
        assert read_one({"type": "image", "path": name}, files).tobytes() == picture().tobytes()
    with pytest.raises(ValueError, match=r"path: 'blue.png' given, an existing file, in .* unless absolute, is"):
        read_one({"type": "image", "path": "blue.png"}, files)
    for other in (".", "/dev/zero", "\0"):
        with pytest.raises(ValueError, match="an existing file"):
            read_one({"type": "image", "image": other}, files)
    with pytest.raises(ValueError, match=r"File name too long\) given, a file that can be read is"):
        read_one({"type": "image", "image": "x" * 300}, files)


def test_content_without_pictures_becomes_one_text_all_kinds_of_pixels_rgb_and_turned_ones_upright() -> None:
    parts = [{"type": kind, "text": kind} for kind in ("text", "input_text", "output_text")]
    others: list[dict[str, Any]] = [{"role": "tool", "content": None}, {"role": "assistant"}]
    turns, found = read_pictures([{"role": "user", "content": parts}, *others], Sources())
    assert (turns, found) == ([{"role": "user", "content": "textinput_textoutput_text"}, *others], [])
    white = (255, 255, 255)
    see_through = picture().convert("RGBA")
    see_through.putalpha(0)
    indexed = picture().convert("P")
    for image, wanted in ((see_through, white), (indexed, RED), (Image.new("1", (2, 2), 1), white), (picture(), RED)):
        pixel: Any = read_one(image_url(data_url(image))).getpixel((0, 0))
        assert max(abs(one - other) for one, other in zip(pixel, wanted, strict=True)) < 40
    printed: Any = read_one(image_url(data_url(picture().convert("CMYK"), "JPEG"))).getpixel((1, 1))
    assert printed[0] > 180 > 80 > printed[1]
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by 90 degrees
    file = file_bytes(Image.new("RGB", (4, 8)), "JPEG", exif=exif)
    assert read_one(image_url(data_url(file))).size == (8, 4)


class Site(Server):
    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 404 if self.path == "/lost" else 200)
        self.send_header("Location", "/red.png")
        self.end_headers()
        with suppress(OSError):  # the reader is gone
            for _ in range(30 if self.path == "/large" else 1):
                self.wfile.write(PNG if self.path == "/red.png" else bytes(2**20))


@pytest.fixture
def website() -> Iterator[str]:
    with serving(Site) as (url, _):
        yield url


def test_addresses_are_fetched_from_allowed_hosts_alone(website: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Sources(hosts=frozenset({"127.0.0.1", "example.org"}))
    assert read_one(image_url(f"{website}/red.png"), sources).tobytes() == picture().tobytes()
    for path, said in {"/moved": "it answers 302", "/lost": "it answers 404", "/large": "bytes given, at most"}.items():
        with pytest.raises(ValueError, match=said):
            read_one(image_url(website + path), sources)
    for url in (website.replace("127.0.0.1", "localhost"), "http://127.0.0.1@localhost/", "file:///etc/passwd", "/etc"):
        with pytest.raises(ValueError, match=r"an address at 127.0.0.1, an address at example.org is allowed"):
            read_one(image_url(url), sources)
    with pytest.raises(ValueError, match=r"ConnectError.* an address that answers"):
        read_one(image_url(LINK), sources)
    monkeypatch.setattr(pictures, "FETCH_SECONDS", 1e-9)
    with pytest.raises(ValueError, match="Timeout"):
        read_one(image_url(f"{website}/red.png"), sources)


def test_without_pillow_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ValueError, match=r"image_url.url: given, but Pillow.* pip install -e '.\[images\]'"):
        read_one(image_url(data_url(PNG)))


def test_fuzzed_files_are_read_or_refused() -> None:
    num_read = 0
    for form in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        whole = file_bytes(picture(), form)
        for place in range(0, len(whole), max(len(whole) // 40, 1)):
            changed = bytearray(whole)
            changed[place] ^= 0xFF
            for content in (bytes(changed), whole[:place]):
                with suppress(ValueError):  # and nothing else
                    read_one({"type": "image", "image": content})
                    num_read += 1
    assert num_read > 20

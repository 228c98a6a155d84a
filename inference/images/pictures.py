"""Reads pictures from the content of messages, in the layouts of clients, data sets and chat templates.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}      as OpenAI's API; also the URL alone
    {"type": "image", "image": PATH, ADDRESS, bytes or a PIL image}               as data sets; also {"bytes": ...}
    {"type": "image", "url": ..., "path": ... or "base64": ...}                   as chat templates of transformers

A picture is turned as its EXIF data says, a transparent one is put on white, and all become 8-bit RGB.
"""

import base64
import binascii
import reprlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx

from headstart.common.errors import wrong_value

Json = dict[str, Any]
TEXTS, PICTURES = ("text", "input_text", "output_text"), ("image_url", "image", "input_image")  # types of parts
FIELDS = ("image_url", "image", "url", "path", "base64")  # of a part, one of which holds the picture
COUNT_MAX = 64  # in a prompt
BYTES_MAX = 20 * 2**20  # of a picture's file
PIXELS_MAX = 64_000_000  # of all pictures in a prompt: 192 MB once they are decoded
FETCH_SECONDS = 10.0
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # few, because each format's reader is a way in
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # of their files
ALLOWED = f"a picture as {', '.join(FORMATS)} is"
DATA = "data:image/png;base64,"
DATA_URL = f"{DATA}..."


@dataclass(frozen=True)
class Sources:
    """Where the pictures of a prompt may come from; data URLs and bytes are always read."""

    folder: Path | None = None  # where relative paths begin; None: no files, as for whatever a server's clients send
    hosts: frozenset[str] = frozenset()  # whose http and https addresses are fetched
    refused: str | None = None  # why no picture is read at all

    @property
    def allowed(self) -> str:
        files = "" if self.folder is None else ", a file"
        return f"a data URL ({DATA_URL}){files}{''.join(f', an address at {host}' for host in sorted(self.hosts))} is"


def read_pictures(messages: Sequence[Json], sources: Sources) -> tuple[list[Json], list[Any]]:
    """The messages with {"type": "image"} in place of each picture, and the pictures (PIL images) in their order.

    Content without a picture becomes one text. Raises ValueError, beginning with the place such as
    messages[2].content[0].image_url, for a picture that cannot be read or may not be, and for videos and sounds.
    """
    turns, pictures = [], list[Any]()
    for number, message in enumerate(messages):
        parts = message.get("content")
        if isinstance(parts, list | tuple):
            places = [f"messages[{number}].content[{index}]" for index in range(len(parts))]
            content = [read_part(*each, sources, pictures) for each in zip(places, parts, strict=True)]
            is_text = all(part["type"] == "text" for part in content)
            message = {**message, "content": "".join(part["text"] for part in content) if is_text else content}
        turns.append(message)
    return turns, pictures


def read_part(place: str, part: Any, sources: Sources, pictures: list[Any]) -> Json:
    """A part as templates take it; a picture is appended to the others of the prompt."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in TEXTS:
        if not isinstance(part.get("text"), str):
            raise wrong_value(f"{place}.text", reprlib.repr(part.get("text")), "a text is", "write it in quotes")
        return {"type": "text", "text": part["text"]}
    if kind in PICTURES and sources.refused is not None:
        raise wrong_value(f"{place}.type", repr(kind), f"only text ({sources.refused}) is", "leave the part out")
    if kind not in PICTURES:
        raise wrong_value(f"{place}.type", reprlib.repr(kind), "text, image_url or image is", "leave the part out")
    name = next((name for name in FIELDS if part.get(name) is not None), None)
    if name is None:
        raise wrong_value(place, reprlib.repr(part), f"a part with {' or '.join(FIELDS)} is", "add the picture")
    value, field = part[name], f"{place}.{name}"
    if isinstance(value, Mapping) and "url" in value:
        value, field = value["url"], f"{field}.url"
    if len(pictures) == COUNT_MAX:
        raise ValueError(f"{field}: picture {COUNT_MAX + 1} of this prompt, {COUNT_MAX} are allowed; send fewer")
    if name == "base64":
        value = f"{DATA}{value}"
    left = PIXELS_MAX - sum(each.width * each.height for each in pictures)
    pictures.append(read_picture(field, value, sources, left))
    return {"type": "image"}


def read_picture(field: str, value: Any, sources: Sources, pixels_max: int = PIXELS_MAX) -> Any:
    """The picture (a PIL image) that a field holds or names."""
    if type(value).__module__.startswith("PIL."):
        return as_rgb(field, reprlib.repr(value), value, pixels_max)
    return decoded(field, reprlib.repr(value), picture_file(field, value, sources), pixels_max)


def picture_file(field: str, value: Any, sources: Sources) -> bytes:
    """The bytes of the file that a field holds or names."""
    if isinstance(value, Mapping):  # as Hugging Face's data sets store it
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    shown = f"{len(value):,} bytes" if isinstance(value, bytes) else reprlib.repr(value)
    if isinstance(value, str | Path):
        text = str(value)
        scheme = text[:8].partition(":")[0].lower() if ":" in text[:8] else ""
        if scheme == "data":
            value = from_data_url(field, text)
        elif scheme in ("http", "https"):
            value = fetched(field, text, sources)
        elif sources.folder is None or scheme not in ("", "file"):
            raise wrong_value(field, shown, sources.allowed, "send the picture itself in a data URL")
        else:
            value = from_file(field, shown, sources.folder, unquote(text[7:]) if scheme else text)
    if isinstance(value, bytes):
        return value
    raise wrong_value(field, shown, sources.allowed, "write it as a text")


def from_file(field: str, shown: str, folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        if not path.is_file():
            raise wrong_value(field, shown, f"an existing file, in {folder} unless absolute, is", "correct the path")
        if (size := path.stat().st_size) > BYTES_MAX:
            raise too_large(field, shown, size)
        return path.read_bytes()
    except OSError as error:
        raise wrong_value(field, f"{shown} ({error.strerror})", "a file that can be read is", "correct it") from None


def from_data_url(field: str, url: str) -> bytes:
    head, comma, content = url.partition(",")
    if not comma or not head.lower().endswith(";base64") or not head[5:].lower().startswith(("image/", ";")):
        raise wrong_value(field, reprlib.repr(url), f"a picture's data URL, {DATA_URL}, is", "encode the file so")
    if len(content) * 3 // 4 > BYTES_MAX:
        raise too_large(field, reprlib.repr(url), len(content) * 3 // 4)
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong_value(field, f"{url[:40]!r} ({error})", "base64 is", "encode the file again") from None


def fetched(field: str, url: str, sources: Sources) -> bytes:
    """The bytes at an address; redirects are not followed, as they may lead to any other host."""
    shown, content, ends = reprlib.repr(url), bytearray(), time.monotonic() + FETCH_SECONDS
    try:
        if httpx.URL(url).host not in sources.hosts:
            raise wrong_value(field, shown, sources.allowed, "send the picture itself in a data URL")
        with httpx.stream("GET", url, timeout=FETCH_SECONDS, headers={"Accept-Encoding": "identity"}) as answer:
            if answer.status_code != 200:
                said = f"{shown} (it answers {answer.status_code})"
                raise wrong_value(field, said, "an address that answers 200 is", "give the picture's final address")
            for chunk in answer.iter_raw():
                content += chunk
                if len(content) > BYTES_MAX:
                    raise too_large(field, shown, len(content))
                if time.monotonic() > ends:
                    raise httpx.ReadTimeout(f"not complete after {FETCH_SECONDS:g} seconds")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        said = f"{shown} ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
        raise wrong_value(field, said, "an address that answers is", "send the picture in a data URL") from None
    return bytes(content)


def too_large(field: str, shown: str, size: int) -> ValueError:
    allowed = f"at most {BYTES_MAX:,} are"
    return wrong_value(field, f"{shown} of {size:,} bytes", allowed, "send a smaller picture")


def pillow(field: str = "pictures") -> Any:
    """The package that reads pictures. Raises ValueError where it is not installed."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        missing = "given, but Pillow, which reads pictures, is not installed"
        raise ValueError(f"{field}: {missing}; pip install -e '.[images]'") from None
    return PIL


def trial_picture() -> Any:
    """A small picture."""
    return pillow().Image.linear_gradient("L").resize((64, 48)).convert("RGB")


def decoded(field: str, shown: str, content: bytes, pixels_max: int) -> Any:
    """The picture in a file's bytes; its size is known from the header, before anything is decoded."""
    pil = pillow(field)
    if not content:
        raise wrong_value(field, f"{shown} (empty)", ALLOWED, "send the file's content")
    try:
        image = pil.Image.open(BytesIO(content), formats=FORMATS)
    except pil.Image.DecompressionBombError:
        raise too_many_pixels(field, shown, "more than 178 million", pixels_max) from None
    except Exception as error:  # headers can be wrong in any way
        raise broken(field, shown, error) from None
    return as_rgb(field, shown, image, pixels_max)


def as_rgb(field: str, shown: str, image: Any, pixels_max: int) -> Any:
    pil = pillow(field)
    if image.width * image.height > pixels_max:
        raise too_many_pixels(field, shown, f"{image.width} x {image.height}", pixels_max)
    if getattr(image, "is_animated", False) and image.format != "MPO":  # a camera's JPEG with a preview
        raise wrong_value(field, f"{shown} (an animation)", "a single picture is", "send one of its pictures")
    if image.mode[0] in "IF":
        given = f"{shown} (more than 8 bits a channel: {image.mode})"
        raise wrong_value(field, given, "8 bits a channel are", "convert it")
    try:
        image = pil.ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            white = pil.Image.new("RGBA", image.size, "white")
            image = pil.Image.alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except Exception as error:  # the content of a file can be wrong in any way
        raise broken(field, shown, error) from None


def too_many_pixels(field: str, shown: str, count: str, pixels_max: int) -> ValueError:
    allowed = f"at most {pixels_max:,} more in this prompt are"
    return wrong_value(field, f"{shown} of {count} pixels", allowed, "send smaller pictures")


def broken(field: str, shown: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:100].partition("<_io")[0]
    return wrong_value(field, f"{shown} (unreadable: {reason})", ALLOWED, "send the whole file again")

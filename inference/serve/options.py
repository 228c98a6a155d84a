"""The command line of `headstart serve`, readable without torch."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from headstart.inference.generate.options import drafts_of, head_of, read_recipe
from headstart.inference.serve.settings import ServerSettings
from headstart.recipes.command_line import command_name
from headstart.recipes.schema import DecodeSection, Recipe

PACKAGES = ("fastapi", "llguidance", "prometheus_client", "uvicorn")
KEYS = "HEADSTART_API_KEY"
DEFAULTS = ServerSettings(())
MEBIBYTE, GIBIBYTE = 2**20, 2**30


@dataclass(frozen=True)
class ServeOptions:
    """What is served, where, and within which limits."""

    target: str
    head: Path | None  # None: drafts need no head
    decode: DecodeSection
    recipe: Recipe | None  # its target section has all fields of the target
    dtype: str  # without a recipe; auto is the fast one for this machine
    host: str
    port: int
    settings: ServerSettings
    shutdown_timeout: float
    memory: int | None  # bytes of the cache; None: as many as all rows may need
    prefix_memory: int | None  # bytes for prefixes of earlier texts; None: none are kept
    always_draft: bool


def serve_options(doc: str | None, argv: Sequence[str] | None = None) -> ServeOptions:
    """What the command line asks for; `doc` opens --help. Mistakes go to stderr and end the process with status 2."""
    parser = argparse.ArgumentParser(
        prog=command_name(), description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(parser)
    add_decoding(parser)
    add_address(parser)
    add_limits(parser)
    given = parser.parse_args(argv)
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        parser.error(
            f"{', '.join(missing)}: not installed, all of {', '.join(PACKAGES)} are needed to serve; "
            f"pip install -e '.[serve]'"
        )
    if given.recipe is None and given.target is None:
        parser.error("--target: missing, a RECIPE or the folder of a model is needed; write one of them")
    recipe = None if given.recipe is None else read_recipe(parser, given)
    head = head_of(recipe) if recipe is not None else given.head
    decode = recipe.decode if recipe is not None else drafts_of(head)
    target = recipe.target.path if recipe is not None else given.target
    check_limits(parser, given)
    if given.max_batch is not None:
        decode = decode.model_copy(update={"max_batch": given.max_batch})
    return ServeOptions(
        target,
        head,
        decode,
        recipe,
        given.dtype or "auto",
        given.host,
        given.port,
        ServerSettings(
            names=tuple(given.served_model_name or [Path(target).name]),
            api_keys=tuple(given.api_key or filter(None, os.environ.get(KEYS, "").split(","))),
            max_batch=decode.max_batch,
            max_queue=given.max_queue,
            max_body=int(given.max_body * MEBIBYTE),
            queue_timeout=given.queue_timeout or None,
            request_timeout=given.request_timeout or None,
            busy_status=given.busy_status,
        ),
        given.shutdown_timeout,
        None if given.memory is None else int(given.memory * GIBIBYTE),
        int(given.prefix_memory * GIBIBYTE) or None,
        given.always_draft,
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="recipe whose target and head are served, and draft as it says")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="section.key=value", help="replaces the recipe's value"
    )
    parser.add_argument("--target", help="folder or hub name of the model, in place of a recipe")
    parser.add_argument("--head", type=Path, help="folder of its draft head (without one: drafts by prompt lookup)")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="number format of the target; auto, the default, is bfloat16 where this machine computes in it. In "
        "float32 texts are exactly those of plain decoding; in bfloat16 near-ties may fall either way",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name that requests give as `model`; repeat it for several (default: the last part of the target's path)",
    )


def add_decoding(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-batch", type=int, help="texts that decode together (default: the recipe's, or 16)")
    parser.add_argument(
        "--memory",
        type=float,
        help="GiB that the cache may take; requests wait until they fit (default: what --max-batch texts of the "
        "requested lengths need)",
    )
    parser.add_argument(
        "--prefix-memory",
        type=float,
        default=0.5,
        help="GiB for the beginnings of earlier texts, so that a conversation or a system prompt that comes again is "
        "not read again; 0 keeps none (default: %(default)g)",
    )
    parser.add_argument(
        "--always-draft",
        action="store_true",
        help="draft at every load. By default a head drafts only while that pays, by step times that are measured "
        "once per machine, before the first request",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines in")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"key that requests must send as `Authorization: Bearer KEY`; repeat it for several (default: those in "
        f"{KEYS}, separated by commas; none are asked for without it)",
    )


def add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-queue",
        type=int,
        default=DEFAULTS.max_queue,
        help="texts that may wait beside them; more are refused with --busy-status (default: %(default)s)",
    )
    parser.add_argument(
        "--busy-status",
        type=int,
        choices=(503, 429),
        default=DEFAULTS.busy_status,
        help="HTTP status of a refusal while the queue is full; clients retry after both (default: %(default)s)",
    )
    parser.add_argument(
        "--max-body",
        type=float,
        default=DEFAULTS.max_body / MEBIBYTE,
        help="largest body of a request in MiB (default: %(default)g)",
    )
    parser.add_argument(
        "--queue-timeout",
        type=float,
        default=DEFAULTS.queue_timeout,
        help="seconds after which a request without a first token is refused; 0: never (default: %(default)g)",
    )
    parser.add_argument(
        "--request-timeout",
        type=float,
        default=0.0,
        help="seconds after which a request ends with what it has, finish_reason abort; 0: never (default: 0)",
    )
    parser.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        help="seconds that running requests get to end after SIGTERM or Ctrl-C; a second one ends at once "
        "(default: %(default)g)",
    )


def check_limits(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """End the process for a number that is out of range."""
    ranges = {
        "port": (given.port, 0, 65535),
        "max-batch": (1 if given.max_batch is None else given.max_batch, 1, 4096),
        "memory": (1 if given.memory is None else given.memory, 0.001, 10**6),
        "prefix-memory": (given.prefix_memory, 0, 10**6),
        "max-queue": (given.max_queue, 0, 10**6),
        "max-body": (given.max_body, 0.001, 1024),
        "queue-timeout": (given.queue_timeout, 0, 10**6),
        "request-timeout": (given.request_timeout, 0, 10**6),
        "shutdown-timeout": (given.shutdown_timeout, 0, 10**6),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            parser.error(f"--{name}: {value} given, {low} to {high} is allowed; correct it or leave it out")
    if any(not key or not key.isprintable() or " " in key for key in given.api_key or ()):
        parser.error("--api-key: an empty key or one with spaces given, visible characters are allowed; change it")
    if any(not name for name in given.served_model_name or ()):
        parser.error("--served-model-name: '' given, a name is allowed; write one, or leave it out")

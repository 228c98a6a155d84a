"""Folders at URLs such as s3://bucket/run: commands work in a local mirror of each, in the user's cache.

The store is the truth. `publish` uploads a whole file before it gets its name in the mirror, so a reader of either sees
whole files only, and `pull` makes the mirror like the store. Retries of failing requests are those of the scheme's
package, and so are credentials, which a URL must not hold.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from filelock import FileLock

from headstart.common.process import user_cache

PARTIAL = ".partial"  # ends the name of a file or folder until it is whole
Info = dict[str, Any]  # what fsspec says of a file


@dataclass(frozen=True)
class Scheme:
    package: str
    extra: str  # that installs the package
    credentials: str  # how its users give them


SCHEMES = {
    "s3": Scheme("s3fs", "s3", "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
    "gs": Scheme("gcsfs", "gcs", "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"),
    "az": Scheme("adlfs", "azure", "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run az login"),
}
WITHOUT_BUCKETS = ("file", "memory")  # for tests
# Files of one process or machine; the lock's owner is read from the store alone.
OWN = re.compile(rf"{re.escape(PARTIAL)}(/|$)|\.lock$|/in_use\.json$")
# Large files, which are fetched when they are read: shards of features and the tensors of checkpoints.
LARGE = re.compile(r"/((train|heldout)-\d+|step-\d+/\w+)\.safetensors$")
GROWING = (".jsonl", ".journal")  # lines are appended to them; uploaded whole, and not with every line
GROWING_SECONDS = 30.0
ATTEMPTS = 3  # downloads of a file that arrives damaged
SECRET = re.compile(r"(://)[^/\s@'\"]*@|(://[^?\s'\"]*\?)[^\s'\"]+")


def cache_limit() -> int:
    """The bytes of shards that the cache may hold: HEADSTART_CACHE_GB, or else half of what its disk has free."""
    given = os.environ.get("HEADSTART_CACHE_GB")
    if given is None:
        mirrors().mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(mirrors()).free // 2
    if re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", given) is None:
        raise ValueError(f"HEADSTART_CACHE_GB: {given} given, a number of gigabytes is allowed; change or unset it")
    return int(float(given) * 1e9)


def is_url(text: str) -> bool:
    return re.match(r"\w+://", text) is not None


def without_secrets(text: str) -> str:
    """A text whose URLs show neither a user and password nor a query."""
    return SECRET.sub(lambda found: f"{found[1]}...@" if found[1] else f"{found[2]}...", text)


def mirrors() -> Path:
    return user_cache("stores").absolute()


def mirror_of(url: str) -> Path:
    """The local folder for a URL; raises ValueError for one that cannot be used."""
    scheme, _, place = url.partition("://")
    if SECRET.search(url):
        known = SCHEMES.get(scheme, SCHEMES["s3"]).credentials
        raise ValueError(f"a URL without user, password and query is allowed, as it is logged; remove them and {known}")
    if scheme not in (*SCHEMES, *WITHOUT_BUCKETS) or not place.strip("/") or ".." in place.split("/"):
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"a folder, or the URL of one below {allowed} is allowed; write it as s3://bucket/folder")
    needed = SCHEMES.get(scheme)
    if needed is not None and find_spec(needed.package) is None:
        install = f"pip install -e '.[{needed.extra}]'"
        raise ValueError(
            f"a folder is allowed, as {scheme}:// needs {needed.package}, which is not here; run {install}"
        )
    return mirrors() / scheme / place.strip("/")


def url_of(path: Path) -> str | None:
    """The URL of a path in a mirror; None for any other."""
    root = mirrors()
    if not path.is_relative_to(root) or len(parts := path.relative_to(root).parts) < 2:
        return None
    return f"{parts[0]}://{'/' * (parts[0] == 'file')}{'/'.join(parts[1:])}"


def shown(text: object) -> str:
    """A text with URLs in place of the mirrors' paths."""
    found = str(text)
    for scheme in (*SCHEMES, *WITHOUT_BUCKETS):
        found = found.replace(f"{mirrors() / scheme}{os.sep}", f"{scheme}://")
    return found


def is_shared(path: Path) -> bool:
    """Whether a path belongs into a store."""
    return url_of(path) is not None and OWN.search(path.as_posix()) is None


@cache
def filesystem(scheme: str) -> Any:
    import fsspec  # takes 0.1 s, which a run on local folders does not need

    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)


def located(path: Path) -> tuple[Any, str]:
    """The file system and the URL of a path in a mirror."""
    url = url_of(path)
    assert url is not None, path
    return filesystem(url.partition("://")[0]), url


@contextmanager
def naming_url(url: str) -> Iterator[None]:
    """Turn an error of a store into a ValueError that names the URL and says what to do."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # each package has errors of its own
        scheme = url.partition("://")[0]
        said, kind = without_secrets(" ".join(str(error).split())), type(error).__name__
        advice = "check the network and the store; the same command then continues"
        if isinstance(error, FileNotFoundError):
            advice = "make it, or correct the name of its bucket or folder"
        elif isinstance(error, PermissionError) or "redential" in f"{kind} {said}":
            advice = f"give credentials that may list, read, write and delete there: {SCHEMES[scheme].credentials}"
        raise ValueError(f"{url}: {kind}: {said}; {advice}") from error


def listing(folder: Path) -> dict[Path, Info]:
    """Every file of a mirrored folder in its store, in one listing; raises ValueError if there is no such bucket."""
    files, url = located(folder)
    with naming_url(url):
        found = files.find(url, detail=True)
        scheme, _, place = url.partition("://")
        if not found and scheme not in WITHOUT_BUCKETS:
            files.ls(f"{scheme}://{place.partition('/')[0]}")
        start = len(files._strip_protocol(url))
    return {folder / name[start:].lstrip("/"): info for name, info in found.items()}


def files_in(folder: Path, suffix: str) -> list[Path]:
    """The files of a folder with this suffix, sorted, whether they are here or only in a store."""
    there = folder.glob(f"*{suffix}") if url_of(folder) is None else listing(folder)
    return sorted(path for path in there if path.parent == folder and path.suffix == suffix)


def written_at(info: Info) -> int:
    """When a file was written, in seconds, under the name that its package gives it."""
    when = next(info[key] for key in ("LastModified", "mtime", "last_modified", "created") if key in info)
    return int(when.timestamp() if isinstance(when, datetime) else when)


def is_same(path: Path, info: Info) -> bool:
    """Whether a file is the store's, by size and time of writing."""
    found = path.stat()
    return found.st_size == info["size"] and int(found.st_mtime) == written_at(info)


def pull(folder: Path) -> None:
    """Make the mirror of a folder like the store: fetch what is new there, remove what is gone. Large files wait."""
    if url_of(folder) is None:
        return
    mirrors().mkdir(parents=True, exist_ok=True)
    with FileLock(mirrors() / "pull.lock"):  # one rank of a machine; the others then find all there
        began = time.time()
        there = {path: info for path, info in listing(folder).items() if is_shared(path)}
        here = [path for path in folder.rglob("*") if path.is_file() and is_shared(path)]
        # A process beside this one may have published a file after the listing.
        kept = {
            path for path in here if path.stat().st_ctime >= began or (path in there and is_same(path, there[path]))
        }
        for path in set(here) - kept:
            is_new = path.suffix in GROWING and path.stat().st_ctime >= began - GROWING_SECONDS  # being uploaded
            if LARGE.search(path.as_posix()) or (path not in there and not is_new):
                path.unlink()
        missing = there.keys() - kept
        download({path: there[path] for path in missing if not LARGE.search(path.as_posix())})


def fetch(path: Path, is_sound: Callable[[Path], bool] = lambda path: True) -> None:
    """Download a large file unless it is here; raises ValueError if it never arrives sound."""
    if url_of(path) is None or path.is_file():
        return
    files, url = located(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".lock")):
        if not path.is_file():
            with naming_url(url):
                info = files.info(url)
            download({path: info}, is_sound)


def download(wanted: Mapping[Path, Info], is_sound: Callable[[Path], bool] = lambda path: True) -> None:
    """Download files of one store; each gets its name once its size, and what `is_sound` checks, is right."""
    # Not NAME.partial: so another process calls the file while it writes it.
    left = {path: path.with_name(f"{path.name}.fetched{PARTIAL}") for path in wanted}
    for attempt in range(ATTEMPTS):
        if not left:
            return
        files, first = located(next(iter(left)))
        try:
            with naming_url(first if len(left) == 1 else f"{first} and {len(left) - 1} other files"):
                files.get([located(path)[1] for path in left], [str(partial) for partial in left.values()])
        except ValueError:  # the package has tried again where a request failed, but not where a body was damaged
            if attempt + 1 < ATTEMPTS:
                continue
            for partial in left.values():
                partial.unlink(missing_ok=True)
            raise
        for path, partial in list(left.items()):
            if partial.stat().st_size == wanted[path]["size"] and is_sound(partial):
                os.utime(partial, times=(written_at(wanted[path]),) * 2)
                if is_longer(path, partial):
                    partial.unlink()
                else:
                    partial.replace(path)
                del left[path]
    if left:
        path, partial = next(iter(left.items()))
        size, found = wanted[path]["size"], partial.stat().st_size
        arrived = f"{url_of(path)} arrived damaged {ATTEMPTS} times (last {found:,} bytes of {size:,})"
        for partial in left.values():
            partial.unlink()
        raise ValueError(f"{arrived}; check the network and the store's copy, then run the same command again")


def is_longer(path: Path, stored: Path) -> bool:
    """Whether a growing file here has all that is stored and more, which a killed process did not upload."""
    if path.suffix not in GROWING or not path.is_file() or path.stat().st_size <= stored.stat().st_size:
        return False
    return path.read_bytes().startswith(stored.read_bytes())


def read_range(path: Path, start: int, end: int) -> bytes:
    """These bytes of a file that is in a store."""
    files, url = located(path)
    with naming_url(url):
        found: bytes = files.cat_file(url, start=start, end=end)
    if len(found) != end - start:
        raise ValueError(f"{url} ends after {start + len(found)} bytes, {end} are needed; it is not whole: remove it")
    return found


def publish(partial: Path, path: Path) -> None:
    """Give a whole file or folder its name, in the store first; of a folder, the files that describe others go last."""
    if is_shared(path):
        inside = [each for each in partial.rglob("*") if each.is_file()] if partial.is_dir() else [partial]
        for each in sorted(inside, key=lambda each: (each.suffix == ".json", each.name)):
            upload(each, path / each.relative_to(partial))
    partial.replace(path)


def upload(source: Path, path: Path) -> None:
    """Store a file under the URL of `path`, where it appears whole."""
    files, url = located(path)
    with naming_url(url):
        files.put_file(str(source), url)
        info = files.info(url)
    if info["size"] != source.stat().st_size:
        raise ValueError(f"{url}: {info['size']} bytes arrived of {source.stat().st_size}; run the same command again")
    os.utime(source, times=(written_at(info),) * 2)


@cache
def last_upload(path: Path) -> list[float]:
    """When a growing file was uploaded last; the list's only item is replaced."""
    return [-GROWING_SECONDS]


def publish_growing(path: Path, seconds: float = GROWING_SECONDS) -> None:
    """Upload a file to which lines are appended, unless that was done within `seconds`."""
    if is_shared(path) and path.is_file() and time.monotonic() - last_upload(path)[0] >= seconds:
        upload(path, path)
        last_upload(path)[0] = time.monotonic()


def delete(*paths: Path) -> None:
    """Remove a folder, or files, from their store, if they are in one."""
    there = [path for path in paths if url_of(path) is not None and PARTIAL not in path.name]
    if there:
        files, url = located(there[0])
        with naming_url(url), suppress(FileNotFoundError):
            files.rm([located(path)[1] for path in there], recursive=there[0].is_dir())


def is_there(path: Path) -> bool:
    """Whether a file exists, here or only in its store."""
    if path.exists() or url_of(path) is None:
        return path.exists()
    files, url = located(path)
    with naming_url(url):
        return bool(files.exists(url))


def create(path: Path, text: str) -> bool:
    """Store a small file unless there is one already; of several processes only one succeeds."""
    files, url = located(path)
    with naming_url(url):
        try:
            files.pipe_file(url, text.encode(), mode="create")
        except OSError:
            if not files.exists(url):
                raise
            return False
    return True


def stored_text(path: Path) -> str | None:
    """The text of a small file as it is in the store; None if it is not there."""
    files, url = located(path)
    with naming_url(url), suppress(FileNotFoundError):
        return str(files.cat_file(url).decode())
    return None


def check_access(folder: Path) -> None:
    """Raise ValueError unless a mirrored folder's store can be listed, written and deleted from."""
    listing(folder)
    probe, (files, url) = f"probe-{secrets.token_hex(4)}", located(folder)
    with naming_url(url):
        files.pipe_file(f"{url}/{probe}", b"probe")
        files.rm_file(f"{url}/{probe}")

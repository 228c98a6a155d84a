"""The folders in which headstart keeps what it can make again, shared by all runs of a user."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """A folder of HEADSTART_CACHE, or of headstart/ in the cache folder of the system."""
    usual = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "headstart"
    return Path(os.environ.get("HEADSTART_CACHE", usual)).expanduser() / kind

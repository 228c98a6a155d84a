"""Models are loaded and saved without the bars of transformers, which would appear in every command."""

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging


@contextmanager
def no_bars_of_transformers() -> Iterator[None]:
    """Switch its bars off, and on again if they were on; the hub's bars of downloads, which it also switches, stay."""
    were_on, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    if were_on:
        logging.disable_progress_bar()
        if hub_bars:
            enable_progress_bars()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()

"""Write safetensors files: whole or not at all, with the permissions of any other new file."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headstart.common.files import naming, remove, removed_on_failure


def write_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the tensors, from any device, to a temporary folder beside `path`, then rename the file to `path`.

    A folder, because safetensors writes to a temporary file of its own, which a killed process leaves behind; the next
    write removes it. Raises OSError that names `path`.
    """
    partial = path.with_name(path.name + ".partial")
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with removed_on_failure(partial), naming(path):
        remove(partial)
        partial.mkdir(parents=True)
        try:
            save_file(on_cpu, partial / path.name, metadata)
        except SafetensorError as error:
            raise as_os_error(error, path) from error
        give_umask_mode(partial / path.name)
        (partial / path.name).replace(path)
        partial.rmdir()


def give_umask_mode(path: Path) -> None:
    """Give a file the permissions of any new file in its folder; safetensors makes its files readable to one user.

    The umask is seen in a new file, because asking for it changes it for a moment, in all threads.
    """
    new = path.with_name(path.name + ".new")
    new.touch()
    path.chmod(new.stat().st_mode)
    new.unlink()


def as_os_error(error: SafetensorError, path: Path) -> Exception:
    """The system's error that safetensors reports as text; the same error if it is none of the system's."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return error if found is None else OSError(int(found[1]), os.strerror(int(found[1])), str(path))

"""Laws of checkpoints: written whole or not at all, restored exactly, and refused if in doubt."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headstart.trainers.run_checkpoints import Checkpoints, Snapshot


def snapshot(step: int, target: dict[str, Tensor] | None = None) -> Snapshot:
    optimizers = {"fc.weight.exp_avg": torch.full((3, 4), float(step)), "fc.weight.step": torch.tensor(float(step))}
    return Snapshot(step, {"fc.weight": torch.full((3, 4), float(step))}, optimizers, target or {})


def saved(folder: Path, *steps: int, **inputs: object) -> Checkpoints:
    checkpoints = Checkpoints(folder, inputs)
    for step in steps:
        checkpoints.save(snapshot(step))
    return checkpoints


def loaded_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.load()
    assert found is not None
    assert found.weights["fc.weight"].eq(found.step).all()
    return found.step


def test_the_two_newest_are_kept_half_written_ones_ignored_and_other_folders_stand_beside_them(tmp_path: Path) -> None:
    """A copy named step-10-copy stopped the run with "invalid literal for int()"."""
    checkpoints = saved(tmp_path, 5)
    (tmp_path / "step-7.partial").mkdir()
    (tmp_path / "step-7.partial/head.safetensors").write_bytes(b"half")
    assert checkpoints.steps() == [5]
    assert loaded_step(checkpoints) == 5
    checkpoints.save(snapshot(10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-5"]
    for name in ("step-10-copy", "step-", "step-011", "step-12.old"):
        shutil.copytree(tmp_path / "step-10", tmp_path / name)
    (tmp_path / "step-13").write_text("a file")
    assert loaded_step(checkpoints) == 10
    for step in (95, 100):
        checkpoints.save(snapshot(step))
    assert checkpoints.steps() == [95, 100]  # by number, not by name
    assert loaded_step(checkpoints) == 100
    assert (tmp_path / "step-10-copy/state.json").is_file()


def spoil(path: Path) -> None:
    """Damage that a reader cannot see: other numbers, and a file of the same length."""
    content = bytearray(path.read_bytes())
    content[-4:] = b"\xff\xff\xff\xff" if path.suffix == ".safetensors" else b"   \n"
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["head.safetensors", "optimizers.safetensors", "target.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, path.stat().st_size // 2), Path.unlink, spoil])
def test_an_unreadable_newest_checkpoint_stops_with_its_name(tmp_path, file, damage):
    checkpoints = saved(tmp_path, 5)
    checkpoints.save(snapshot(10, target={"fc.weight": torch.ones(3, 4)}))
    damage(tmp_path / "step-10" / file)
    with pytest.raises(ValueError, match=r"step-10 cannot be read \(.*\); remove it to resume from step-5$") as error:
        checkpoints.load()
    assert file in str(error.value) or file == "state.json"
    shutil.rmtree(tmp_path / "step-10")
    assert loaded_step(checkpoints) == 5

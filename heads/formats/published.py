"""Translates published heads into our own layout: reports what it had to infer, refuses what our heads cannot do."""

from dataclasses import asdict

from headstart.heads.base import DraftHead
from headstart.heads.files import HeadFiles
from headstart.heads.formats import config_rules, tensor_rules
from headstart.heads.formats.layouts import layout_of
from headstart.heads.formats.subject import Subject, Translation
from headstart.heads.frozen import FrozenTarget
from headstart.heads.kinds.checkpoint import head_from_files


def import_head(files: HeadFiles, frozen: FrozenTarget) -> tuple[DraftHead, list[str]]:
    """The head, in the dtype of `frozen`, and a line for each fact that had to be inferred.

    Raises one ValueError that names everything our heads cannot represent and every wrong tensor.
    """
    subject, translation = translate(files, frozen)
    rules = (*tensor_rules.WEIGHTS, config_rules.fits_the_target)
    refused = translation.refused + [each.text for rule in rules for each in rule(subject, "headstart")]
    translation.config["headstart"] = {
        "taps": list(subject.taps),
        "target_num_layers": frozen.config.num_layers,
        "target_rope": asdict(frozen.config.rope),
        **{key: value for key, value in subject.note.items() if key != "engines"},
        "kind": subject.kind,
    }
    try:
        if not subject.missing_sizes:
            head = head_from_files(files.folder, translation.config, translation.tensors, frozen)
    except ValueError as error:
        refused.append(str(error))
    if refused:
        advice = "correct the files, or get a head that headstart can represent"
        raise ValueError(f"{files.folder} cannot be used: {'; '.join(refused)}; {advice}")
    return head, translation.inferred


def translate(files: HeadFiles, frozen: FrozenTarget) -> tuple[Subject, Translation]:
    """The files in our own layout, with everything inferred and refused on the way; builds no head yet."""
    unprefixed = {name.removeprefix("model."): tensor for name, tensor in files.tensors.items()}
    files_as_read = HeadFiles(files.folder, files.config, unprefixed)
    subject = Subject(files_as_read, layout_of(files_as_read), frozen)
    translation = Translation(dict(subject.config), dict(subject.tensors), [f"layout: {subject.layout.name}"])
    if subject.config.get("target_hidden_size") is None:
        translation.config.pop("target_hidden_size", None)
    if unprefixed.keys() != files.tensors.keys():
        translation.inferred.append("names: the prefix `model.` was removed")
    for step in subject.layout.steps:
        step(subject, translation)
    return subject, translation

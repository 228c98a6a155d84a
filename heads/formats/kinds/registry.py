"""All layouts of draft heads, and which one a head's files have."""

from headstart.heads.files import HeadFiles
from headstart.heads.formats.kinds.block import BLOCK, SPECULATORS_BLOCK
from headstart.heads.formats.kinds.eagle import EAGLE1, EAGLE3, EAGLE3_SPECULATORS, PEAGLE
from headstart.heads.formats.kinds.medusa import MEDUSA
from headstart.heads.formats.kinds.mtp import MTP
from headstart.heads.formats.subject import Layout

# The first one that recognises a head's files is theirs.
LAYOUTS: tuple[Layout, ...] = (MEDUSA, SPECULATORS_BLOCK, BLOCK, PEAGLE, EAGLE3_SPECULATORS, EAGLE3, EAGLE1, MTP)


def layout_of(files: HeadFiles) -> Layout:
    """The layout of a head's files, recognised by their content; ValueError for an unknown one."""
    kind = files.config.get("headstart", {}).get("kind")
    recognised = [layout for layout in LAYOUTS if layout.recognises(files)]
    if matches := recognised or [layout for layout in LAYOUTS if layout.name == kind]:
        return matches[0]
    unknown = f"the layout of this draft head is unknown (its tensors: {', '.join(sorted(files.names)[:4])}, ...)"
    allowed = "EAGLE-1, EAGLE-3, P-EAGLE, speculators' eagle3, Medusa, DFlash and DSpark are allowed"
    advice = "give the folder of such a head, or bring a whole target's MTP layer in with headstart convert"
    raise ValueError(f"{files.folder}: {unknown}; {allowed}: {advice}")

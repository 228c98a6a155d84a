"""The layout of an MTP head: its target's own, under the names of the target's files."""

from headstart.heads.formats import config_rules, tensor_rules
from headstart.heads.formats.commands import sglang_command, vllm_command
from headstart.heads.formats.subject import Layout
from headstart.heads.kinds.mtp import MtpHead

MTP = Layout(
    name="mtp",
    kind=MtpHead,
    recognises=lambda files: False,  # by our own section of config.json alone
    rules=dict.fromkeys(("vllm", "sglang"), (config_rules.fits_the_target, *tensor_rules.WEIGHTS)),
    commands={"vllm": vllm_command("mtp"), "sglang": sglang_command("NEXTN")},
)

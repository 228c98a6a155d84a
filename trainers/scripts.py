"""Which script trains which kind of head, readable without torch."""

SCRIPTS = {
    "eagle1": "trainers/eagle.py",
    "eagle3": "trainers/eagle.py",
    "medusa": "trainers/medusa.py",
    "block": "trainers/block.py",
}


def training_module(kind: str) -> str:
    """The module of the script that trains a kind of head, as `python -m` takes it from any folder."""
    return "headstart." + SCRIPTS[kind].removesuffix(".py").replace("/", ".")

"""Run by a Python that has speculators: load a head with its own classes and save it with its own save_pretrained.

python tests/interop/save_with_speculators.py EXPORT OUT
"""

import sys

from speculators.models.eagle3 import Eagle3DraftModel

if __name__ == "__main__":
    Eagle3DraftModel.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])

"""Load a head with speculators' own classes and save it again; needs a Python that has speculators.

python tests/interop/save_with_speculators.py EXPORT OUT
"""

import sys

from speculators.models.eagle3 import Eagle3DraftModel

if __name__ == "__main__":
    Eagle3DraftModel.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])

"""Find out why a head guesses worse than it should: a fault in its files, or in an export of it.

    headstart doctor assets/demo_head assets/demo_target
    headstart doctor runs/tiny/head assets/demo_target runs/tiny/export/vllm

The target continues held-out prompts greedily, and the head guesses each of the target's tokens from the true tokens
before it. The table shows how often its top guess is right, by depth: for HEAD as it was trained, and for EXPORT as its
engine interprets it. Then one thing is changed at a time and measured again:

  with EXPORT    each part in which EXPORT differs from HEAD: taps, norms, vocabulary map, RoPE, weights
  HEAD alone     variants of how its files are interpreted: other taps, norm flags, RoPE bases, token shifts, maps

Each finding is one line: what was found, what would be right, what it costs, and how to fix it.
Exit code 1 if anything is found, 0 otherwise.
"""

from headstart.inference.doctor.options import doctor_options

if __name__ == "__main__":
    doctor_options(__doc__)  # --help and mistakes end the process here, before torch is loaded

from headstart.inference.doctor.command import main

if __name__ == "__main__":
    main()

"""The kinds of draft heads, one a file, and their checkpoints."""

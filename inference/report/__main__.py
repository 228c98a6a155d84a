"""`python -m inference.report`. Spawned workers do not import this file, so the command itself is in command.py."""

from headstart.inference.report.command import main

if __name__ == "__main__":
    main()

"""`python -m inference.report`. Workers that are spawned do not import this file, so it must stay a shim."""

from inference.report.command import main

if __name__ == "__main__":
    main()

"""`python -m inference.doctor`."""

from headstart.inference.doctor.command import main

if __name__ == "__main__":
    main()

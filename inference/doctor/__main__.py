"""`python -m inference.doctor`."""

from inference.doctor.command import main

if __name__ == "__main__":
    main()

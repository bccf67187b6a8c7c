"""`python -m scopetrace`."""

from scopetrace.cli import main

if __name__ == "__main__":
    main()

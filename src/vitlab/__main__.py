"""`python -m vitlab` is the same command."""

from vitlab.cli.main import main

if __name__ == "__main__":
    main()

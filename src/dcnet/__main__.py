"""`python -m dcnet`."""

from dcnet.cli import main

if __name__ == "__main__":
    main()

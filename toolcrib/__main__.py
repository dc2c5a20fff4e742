"""`python -m toolcrib COMMAND`, the same as the console script."""

from toolcrib.command_line import main

if __name__ == "__main__":
    main()

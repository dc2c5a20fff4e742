#!/usr/bin/env python
"""Run a Toolcrib command: `python manage.py help` lists them."""

from toolcrib.command_line import main

if __name__ == "__main__":
    main()

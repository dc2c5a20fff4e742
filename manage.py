#!/usr/bin/env python
"""Run a Toolcrib command: `python manage.py help` lists them."""

import os
import sys

import django
from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "toolcrib.settings")
    django.setup()

    from toolcrib.config.databases import make_tables_if_new

    make_tables_if_new(sys.argv[1:2])
    execute_from_command_line(sys.argv)

"""Toolcrib's composition root. Importing it loads nothing: `celery -A toolcrib` finds celery.py."""

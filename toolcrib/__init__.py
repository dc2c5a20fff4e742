"""Composition root of the project. Imports nothing: `celery -A toolcrib` finds celery.py."""

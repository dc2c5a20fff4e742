"""Audit log: record changes and read them back."""

from catalog.audit.log import SENTENCES, record, sentence
from toolcrib.lib.roles import SYSTEM, Actor

__all__ = ["SENTENCES", "SYSTEM", "Actor", "record", "sentence"]

"""Audit log: record changes and read them back."""

from catalog.audit.log import SENTENCES, record, record_installation, record_read, sentence
from toolcrib.lib.roles import SYSTEM, Actor

__all__ = [
    "SENTENCES",
    "SYSTEM",
    "Actor",
    "record",
    "record_installation",
    "record_read",
    "sentence",
]

"""The audit log: who changed what, and when."""

from catalog.audit.log import SENTENCES, SYSTEM, Actor, record, sentence

__all__ = ["SENTENCES", "SYSTEM", "Actor", "record", "sentence"]

"""Database models of the catalog."""

from catalog.models.audit import AuditEntry, AuditQuerySet
from catalog.models.definitions import (
    CallPolicy,
    Definition,
    DefinitionChange,
    JsonSchema,
    Tool,
    ToolQuerySet,
    ToolState,
)
from catalog.models.groups import Group, Membership
from catalog.models.preferences import Preference
from catalog.models.revision import CatalogSnapshot, Revision
from catalog.models.search import (
    MAX_HINT_LENGTH,
    MAX_QUERY_LENGTH,
    GoldenQuery,
    GoldenResult,
    GoldenRun,
    HintKind,
    ToolHint,
    Vector,
)

__all__ = [
    "MAX_HINT_LENGTH",
    "MAX_QUERY_LENGTH",
    "AuditEntry",
    "AuditQuerySet",
    "CallPolicy",
    "CatalogSnapshot",
    "Definition",
    "DefinitionChange",
    "GoldenQuery",
    "GoldenResult",
    "GoldenRun",
    "Group",
    "HintKind",
    "JsonSchema",
    "Membership",
    "Preference",
    "Revision",
    "Tool",
    "ToolHint",
    "ToolQuerySet",
    "ToolState",
    "Vector",
]

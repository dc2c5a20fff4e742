"""The tables of the catalog."""

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
    LONGEST_HINT,
    LONGEST_QUERY,
    GoldenQuery,
    GoldenResult,
    GoldenRun,
    HintKind,
    ToolHint,
    Vector,
)

__all__ = [
    "LONGEST_HINT",
    "LONGEST_QUERY",
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

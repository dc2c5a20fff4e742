"""Database models of the catalog."""

from catalog.models.audit import AuditEntry as AuditEntry
from catalog.models.audit import AuditQuerySet as AuditQuerySet
from catalog.models.definitions import CallPolicy as CallPolicy
from catalog.models.definitions import Definition as Definition
from catalog.models.definitions import DefinitionChange as DefinitionChange
from catalog.models.definitions import JsonSchema as JsonSchema
from catalog.models.definitions import Tool as Tool
from catalog.models.definitions import ToolState as ToolState
from catalog.models.groups import Group as Group
from catalog.models.groups import Membership as Membership
from catalog.models.preferences import Preference as Preference
from catalog.models.revision import CatalogSnapshot as CatalogSnapshot
from catalog.models.revision import Revision as Revision
from catalog.models.search import GoldenQuery as GoldenQuery
from catalog.models.search import GoldenResult as GoldenResult
from catalog.models.search import GoldenRun as GoldenRun
from catalog.models.search import HintKind as HintKind
from catalog.models.search import ToolHint as ToolHint
from catalog.models.search import Vector as Vector

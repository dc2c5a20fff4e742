"""Prompts, resources and templates of a server: parsed, and stored as its list has them.

They are not reviewed as tools are: what they contain is fetched when it is asked for, so an
approval of the listed text would promise nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from django.conf import settings

from catalog.definitions.json_schema import deeper_than
from catalog.definitions.parsing import CONTROL_CHARACTERS, MAX_NAME, without_hidden
from catalog.definitions.public_names import public_names
from catalog.models import Feature, FeatureKind, Revision
from toolcrib.lib.json_codec import canonical, digest
from toolcrib.lib.protocols.jsonrpc import MAX_DEPTH

if TYPE_CHECKING:
    from servers.models import Server

MAX_URI = 2_000
BATCH_SIZE = 500
KEYS = {
    FeatureKind.PROMPT: "name",
    FeatureKind.RESOURCE: "uri",
    FeatureKind.TEMPLATE: "uriTemplate",
}
TEXTS = ("title", "description", "mimeType")
OBJECTS = ("annotations", "_meta")
URI_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True)
class RemoteFeature:
    kind: str
    key: str
    body: str


def read_features(
    listings: Mapping[str, Sequence[object]], max_bytes: int
) -> tuple[list[RemoteFeature], int]:
    """Parse the items of each kind, the first of each key; return how many are invalid too."""
    features: dict[tuple[str, str], RemoteFeature] = {}
    invalid = 0
    for kind, items in listings.items():
        for item in items:
            feature = _read(kind, item, max_bytes)
            if feature is None or (kind, feature.key) in features:
                invalid += 1
            else:
                features[kind, feature.key] = feature
    return list(features.values()), invalid


def _read(kind: str, item: object, max_bytes: int) -> RemoteFeature | None:
    if not isinstance(item, dict) or deeper_than(item, MAX_DEPTH):
        return None
    key = item.get(KEYS[FeatureKind(kind)])
    if not isinstance(key, str) or not key or CONTROL_CHARACTERS.search(key):
        return None
    is_prompt = kind == FeatureKind.PROMPT
    if len(key) > (MAX_NAME if is_prompt else MAX_URI):
        return None
    if not is_prompt and not URI_SCHEME.match(key):
        return None
    is_valid = (
        isinstance(item.get("name"), str)
        and all(isinstance(item.get(name, ""), str | None) for name in TEXTS)
        and all(isinstance(item.get(name, {}), dict | None) for name in OBJECTS)
        and _are_arguments(item.get("arguments"))
    )
    if not is_valid:
        return None
    try:
        body = canonical(item)
        if len(body.encode()) > max_bytes:
            return None
        if settings.REMOVE_HIDDEN_CHARACTERS:
            body = canonical(without_hidden(item, body) or item)
    except (ValueError, TypeError):  # invalid Unicode, or a number that JSON cannot represent
        return None
    return RemoteFeature(str(kind), key, body)


def _are_arguments(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in value)
    )


def apply_features(server: "Server", remote: Iterable[RemoteFeature], kinds: Iterable[str]) -> bool:
    """Replace a server's features of these kinds; return whether anything changed.

    Call inside a transaction.
    """
    existing = {
        (row.kind, row.key_sha256): row
        for row in Feature.objects.filter(server=server, kind__in=list(kinds))
    }
    remote = list(remote)
    names = _prompt_names(server, remote, existing.values())
    created, updated, seen = [], [], set()
    for position, item in enumerate(remote):
        identity = (item.kind, digest(item.key))
        seen.add(identity)
        row = existing.get(identity)
        if row is None:
            public = names.get(item.key, "") if item.kind == FeatureKind.PROMPT else ""
            created.append(
                Feature(
                    server=server,
                    kind=item.kind,
                    key=item.key,
                    key_sha256=identity[1],
                    public_name=public,
                    body=item.body,
                    position=position,
                )
            )
        elif (row.body, row.position) != (item.body, position):
            row.body, row.position = item.body, position
            updated.append(row)
    removed = [row.pk for identity, row in existing.items() if identity not in seen]
    for start in range(0, len(removed), BATCH_SIZE):
        Feature.objects.filter(pk__in=removed[start : start + BATCH_SIZE]).delete()
    Feature.objects.bulk_create(created, batch_size=BATCH_SIZE)
    Feature.objects.bulk_create(
        updated,
        batch_size=BATCH_SIZE,
        update_conflicts=True,
        unique_fields=["id"],
        update_fields=["body", "position"],
    )
    if created or updated or removed:
        Revision.bump()
        return True
    return False


def _prompt_names(
    server: "Server", remote: Iterable[RemoteFeature], existing: Iterable[Feature]
) -> dict[str, str]:
    """Return public names for new prompts."""
    known = {row.key for row in existing if row.kind == FeatureKind.PROMPT}
    new = [item.key for item in remote if item.kind == FeatureKind.PROMPT and item.key not in known]
    taken = Feature.objects.filter(public_name__startswith=f"{server.slug}__")
    return public_names(server.slug, new, set(taken.values_list("public_name", flat=True)))

"""What of a tool on the shelf is searched: what its server sent, and what an admin added."""

from collections.abc import Sequence

from catalog.cache import Item
from catalog.search.engine import Searchable


def searchable(item: Item, groups: Sequence[str]) -> Searchable:
    """A tool as search sees it, with the texts of the groups it is in."""
    title, parameters = item.approved.searched if item.approved else ("", "")
    return Searchable(
        name=item.name,
        own_name=item.own_name,
        server=item.server,
        title=title,
        description=item.description,
        parameters=parameters,
        groups=tuple(groups),
        hints=item.hints,
    )

"""First description of a server's group, made from what the server says of itself.

It is made once, at the first sync, if the group has none: text that a server changes later reaches
agents through reviewed definitions only. Until a person edits it, it is marked as the server's.
"""

from collections.abc import Sequence

from django.db import transaction

from catalog import audit, rendering
from catalog.definitions.findings import instructs_reader
from catalog.groups import actions
from catalog.models import Group, Tool
from toolcrib.lib.text import remove_hidden

MAX_LENGTH = rendering.MAX_DESCRIPTION_LENGTH
MAX_NAMES = 12


def compose(label: str, title: str, instructions: str, tool_names: Sequence[str]) -> str:
    """Return one line of title and instructions, or of tool names if the server sent neither.

    `label` is the group's name, which the catalog prints already. A text that instructs its reader
    is left out.
    """
    texts = [rendering.one_line(remove_hidden(text)) for text in (title, instructions)]
    title, instructions = ("" if instructs_reader(text) else text for text in texts)
    if title.casefold() == label.casefold():
        title = ""
    head = f"{title.rstrip('.')}. " if title and instructions else title
    if len(head) < MAX_LENGTH // 2 and instructions:
        head += rendering.summary(instructions, MAX_LENGTH - len(head))
    return head[:MAX_LENGTH].strip() or _name_list(tool_names)


def _name_list(names: Sequence[str]) -> str:
    """Return the first tool names as words, as many as fit."""
    words = [rendering.name_in_words(name) for name in names]
    for shown in range(min(len(words), MAX_NAMES), 0, -1):
        more = f", and {len(words) - shown} more" if shown < len(words) else ""
        text = f"{rendering.NAME_LIST}{', '.join(words[:shown])}{more}"
        if len(text) <= MAX_LENGTH and not instructs_reader(text):
            return text
    return ""


@transaction.atomic
def describe(server: int, *, title: str, instructions: str) -> None:
    """Describe the group that mirrors a server, unless it has a description."""
    group = Group.objects.filter(follows=server, description="").first()
    if group is None:
        return
    tools = Tool.objects.servable().filter(server=server).order_by("public_name")
    names = list(tools.values_list("name", flat=True))
    text = compose(group.display_name, title, instructions, names)
    if text:
        Group.objects.filter(pk=group.pk).update(server_description=text)
        actions.edit(group, description=text, actor=audit.SYSTEM)

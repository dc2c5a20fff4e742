"""Icons of lucide, each drawn once: a page may show hundreds, and drawing parses XML anew."""

from functools import lru_cache

from django import template
from lucide.templatetags import lucide as drawing

register = template.Library()


@register.simple_tag
def lucide(name: str, *, size: int | None = 24, **attributes: object) -> str:
    return _drawn(name, size, tuple(sorted((key, str(one)) for key, one in attributes.items())))


@lru_cache(maxsize=1_000)
def _drawn(name: str, size: int | None, attributes: tuple[tuple[str, str], ...]) -> str:
    # The library escapes what it is given, and marks what it draws as safe.
    drawn: str = drawing.lucide(name, size=size, **dict(attributes))
    return drawn

"""Cached lucide icons: a page may show hundreds, and rendering one parses XML."""

from functools import lru_cache

from django import template
from lucide.templatetags import lucide as lucide_library

register = template.Library()


@register.simple_tag
def lucide(name: str, *, size: int | None = 24, **attributes: object) -> str:
    return _render(
        name, size, tuple(sorted((key, str(value)) for key, value in attributes.items()))
    )


@lru_cache(maxsize=1_000)
def _render(name: str, size: int | None, attributes: tuple[tuple[str, str], ...]) -> str:
    # The library escapes attributes and marks its output as safe.
    svg: str = lucide_library.lucide(name, size=size, **dict(attributes))
    return svg

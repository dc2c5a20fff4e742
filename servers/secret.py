"""Secret string that cannot be printed, logged, rendered, pickled or serialized by accident.

Pure. Only `reveal()`, called when a connection is opened, returns the text.
"""

from typing import NoReturn


class Secret:
    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return "***"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "***"

    def __reduce__(self) -> NoReturn:
        raise TypeError("A secret cannot be pickled.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

"""Make every character of a text visible, so that what is confirmed is what is seen. Pure."""

import unicodedata

# Drawn as nothing or as blanks, though Unicode does not class them as format characters.
_BLANK_LOOKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")


def is_hidden(character: str) -> bool:
    """Say whether a character is drawn as nothing, as a blank, or turns the text around."""
    if " " <= character <= "~":
        return False
    return (
        unicodedata.category(character) in ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")
        or character in _BLANK_LOOKS
        or "\ufe00" <= character <= "\ufe0f"
        or "\U000e0100" <= character <= "\U000e01ef"
    )


def visible(text: str) -> str:
    """Write invisible, direction-changing and control characters as ⟨U+202E⟩."""
    # The opening bracket too, or a text could pretend to hold what it does not.
    return "".join(f"⟨U+{ord(c):04X}⟩" if is_hidden(c) or c == "⟨" else c for c in text)

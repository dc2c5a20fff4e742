"""Demo MCP server: 24 harmless tools over stdio, to try Toolcrib offline.

Runs as a separate process, `python -m servers.demo`; no other module imports it.
"""

import base64
import colorsys
import hashlib
import json
import math
import random
import statistics
import textwrap
import uuid
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from mcp.server import MCPServer
from mcp.types import ToolAnnotations
from pydantic import Field

demo = MCPServer(
    "toolcrib-demo",
    instructions="Small tools on text, numbers, dates, units and colours. All of it stays here.",
)
tool = demo.tool(
    annotations=ToolAnnotations(
        read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
)
Text = Annotated[str, Field(description="The text to work on", max_length=20_000)]
Numbers = Annotated[list[float], Field(description="The numbers", min_length=1, max_length=1000)]
Unit = Literal["m", "km", "mi", "ft", "in", "cm"]
METRES = {"m": 1.0, "km": 1000.0, "mi": 1609.344, "ft": 0.3048, "in": 0.0254, "cm": 0.01}
Scale = Literal["celsius", "fahrenheit", "kelvin"]


@tool
def count_words(text: Text) -> dict[str, int]:
    """Count the characters, words and lines of a text."""
    return {"characters": len(text), "words": len(text.split()), "lines": len(text.splitlines())}


@tool
def change_case(text: Text, to: Literal["upper", "lower", "title", "sentence"]) -> str:
    """Write a text in upper, lower, title or sentence case."""
    if to == "sentence":
        return text[:1].upper() + text[1:].lower()
    return str(getattr(text, to)())


@tool
def reverse_text(text: Text) -> str:
    """Write a text backwards."""
    return text[::-1]


@tool
def wrap_text(text: Text, width: Annotated[int, Field(ge=10, le=200)] = 72) -> str:
    """Break a text into lines of at most the given width."""
    return textwrap.fill(text, width)


@tool
def find_replace(
    text: Text,
    find: Annotated[str, Field(description="What to look for, taken literally", min_length=1)],
    replace: Annotated[str, Field(description="What to put in its place")] = "",
) -> str:
    """Replace every occurrence of one piece of text by another."""
    return text.replace(find, replace)


@tool
def sort_lines(text: Text, unique: bool = False) -> str:
    """Sort the lines of a text, keeping each once if wanted."""
    lines = text.splitlines()
    return "\n".join(sorted(set(lines) if unique else lines))


@tool
def make_slug(text: Text) -> str:
    """Turn a title into lower-case words joined by hyphens, as used in addresses."""
    words = "".join(char if char.isalnum() else " " for char in text.lower()).split()
    return "-".join(words)


@tool
def format_json(text: Text, indent: Annotated[int, Field(ge=0, le=8)] = 2) -> str:
    """Check that a text is JSON and write it with even indentation."""
    return json.dumps(json.loads(text), indent=indent, ensure_ascii=False)


@tool
def encode_base64(text: Text) -> str:
    """Encode a text as Base64."""
    return base64.b64encode(text.encode()).decode()


@tool
def decode_base64(text: Text) -> str:
    """Decode Base64 into the text it stands for."""
    return base64.b64decode(text, validate=True).decode()


@tool
def hash_text(text: Text, algorithm: Literal["sha256", "sha512", "blake2b"] = "sha256") -> str:
    """Compute a checksum of a text."""
    return hashlib.new(algorithm, text.encode()).hexdigest()


@tool
def add_numbers(numbers: Numbers) -> float:
    """Add up numbers."""
    return math.fsum(numbers)


@tool
def summarize_numbers(numbers: Numbers) -> dict[str, float]:
    """Describe numbers: least, most, mean, median and spread."""
    return {
        "least": min(numbers),
        "most": max(numbers),
        "mean": statistics.fmean(numbers),
        "median": statistics.median(numbers),
        "spread": statistics.pstdev(numbers),
    }


@tool
def compute_percentage(part: float, whole: Annotated[float, Field(gt=0)]) -> float:
    """Say what percentage one number is of another."""
    return 100 * part / whole


@tool
def compound_interest(
    principal: Annotated[float, Field(description="Money at the start", ge=0)],
    rate_percent: Annotated[float, Field(description="Interest a year, in percent")],
    years: Annotated[int, Field(ge=0, le=200)],
) -> float:
    """Compute what money grows to with yearly compound interest."""
    return round(principal * (1 + rate_percent / 100) ** years, 2)


@tool
def factor_number(number: Annotated[int, Field(ge=2, le=10**9)]) -> list[int]:
    """Split a whole number into its prime factors."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors


@tool
def convert_length(value: float, unit: Unit, to: Unit) -> float:
    """Convert a length between metres, kilometres, miles, feet, inches and centimetres."""
    return value * METRES[unit] / METRES[to]


@tool
def convert_temperature(value: float, scale: Scale, to: Scale) -> float:
    """Convert a temperature between Celsius, Fahrenheit and Kelvin."""
    celsius = {"celsius": value, "fahrenheit": (value - 32) / 1.8, "kelvin": value - 273.15}[scale]
    return {"celsius": celsius, "fahrenheit": celsius * 1.8 + 32, "kelvin": celsius + 273.15}[to]


@tool
def current_time(
    zone: Annotated[str, Field(description="IANA name, such as Europe/Oslo")] = "UTC",
) -> str:
    """Tell the date and time in a time zone."""
    return datetime.now(ZoneInfo(zone)).isoformat(timespec="seconds")


@tool
def days_between(first: date, second: date) -> int:
    """Count the days from one date to another."""
    return (second - first).days


@tool
def add_days(start: date, days: Annotated[int, Field(ge=-100_000, le=100_000)]) -> str:
    """Find the date a number of days after or before another, with its weekday."""
    return (start + timedelta(days=days)).strftime("%Y-%m-%d %A")


@tool
def describe_color(
    hex_color: Annotated[str, Field(description="Such as #0B5C8A", pattern="^#[0-9A-Fa-f]{6}$")],
) -> dict[str, float]:
    """Split a colour into red, green, blue, hue, lightness and saturation."""
    red, green, blue = (int(hex_color[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    return {
        "red": round(red * 255),
        "green": round(green * 255),
        "blue": round(blue * 255),
        "hue": round(hue * 360, 1),
        "lightness": round(lightness, 3),
        "saturation": round(saturation, 3),
    }


@tool
def roll_dice(
    count: Annotated[int, Field(ge=1, le=100)] = 1, sides: Annotated[int, Field(ge=2, le=1000)] = 6
) -> list[int]:
    """Roll dice and return each result."""
    return [random.randint(1, sides) for _ in range(count)]  # noqa: S311 (dice, not secrets)


@tool
def make_uuid() -> dict[str, str]:
    """Make a random identifier, with the time it was made."""
    return {"uuid": str(uuid.uuid4()), "made_at": datetime.now(UTC).isoformat(timespec="seconds")}


if __name__ == "__main__":
    demo.run()

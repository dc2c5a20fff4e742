"""Server with many tools in pages, and optionally with invalid cursors.

python -m tests.support.upstreams.many [--tools N] [--pages P] [--cursor HOW] [--http PORT] ...
"""

from typing import Any

from mcp.server import Server
from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool

from tests.support.upstreams.serving import parser, serve

CURSORS = ("same", "cycle", "endless", "empty", "huge", "integer", "none")


REAL_DESCRIPTION = (
    "Search the records of project {number} by title, text, owner and date. Returns the best "
    "matches first, each with its identifier, title, owner and the time it was last changed. Use "
    "it before you read or change a record, and narrow the search if more than a hundred match."
)
REAL_SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "Words that must stand in the record"},
        "owner": {"type": "string", "description": "Only records of this person, by e-mail"},
        "changed_after": {"type": "string", "format": "date-time", "description": "ISO time"},
        "order": {"type": "string", "enum": ["best", "newest", "oldest"], "default": "best"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    "required": ["query"],
    "additionalProperties": False,
}


def paginated_server(
    tools: int = 100, pages: int = 10, cursor: str = "none", *, real: bool = False
) -> Server[Any]:
    """Build the server. Cursors are page numbers as text unless `cursor` selects invalid ones."""
    per_page = -(-tools // pages)
    requests = 0

    async def list_tools(ctx, params) -> ListToolsResult:
        nonlocal requests
        requests += 1
        current = params.cursor if params else None
        page = int(current) if current and current.isdigit() and cursor == "none" else 0
        first = page * per_page
        page_tools = [
            Tool(
                name=f"tool_{number}",
                description=REAL_DESCRIPTION.format(number=number) if real else "One of many.",
                input_schema=REAL_SCHEMA if real else {"type": "object"},
            )
            for number in range(first, min(first + per_page, tools))
        ]
        following = {
            "none": str(page + 1) if page + 1 < pages else None,
            "same": "again",
            "cycle": "b" if current == "a" else "a",
            "endless": f"page-{requests}",
            "empty": "",
            "huge": "x" * 1_000_000,
            "integer": 7,
        }[cursor]
        # model_construct: the SDK would reject an integer.
        return ListToolsResult.model_construct(
            tools=page_tools,
            next_cursor=following,
            ttl_ms=60_000,
            cache_scope="private",
            result_type="complete",
        )

    async def call_tool(ctx, params) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text=params.name)])

    return Server("many", version="1.0", on_list_tools=list_tools, on_call_tool=call_tool)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--tools", type=int, default=100)
    arguments.add_argument("--pages", type=int, default=10)
    arguments.add_argument("--cursor", choices=CURSORS, default="none")
    arguments.add_argument("--real", action="store_true", help="definitions of ordinary size")
    options = arguments.parse_args()
    serve(
        paginated_server(options.tools, options.pages, options.cursor, real=options.real), options
    )

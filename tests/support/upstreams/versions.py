"""Server with the version of its tool list in every description.

Every listing from the first page is a new version, so that a catalog with two versions shows a
partial sync. python -m tests.support.upstreams.versions [--tools N] [--pages P] [--http PORT] ...
"""

from typing import Any

from mcp.server import Server
from mcp_types import ListToolsResult, Tool

from tests.support.upstreams.serving import parser, serve


def versioned(tools: int, pages: int) -> Server[Any]:
    per_page = -(-tools // pages)
    version = 0

    async def list_tools(ctx, params) -> ListToolsResult:
        nonlocal version
        page = int(params.cursor) if params and params.cursor else 0
        if page == 0:
            version += 1
        first = page * per_page
        page_tools = [
            Tool(
                name=f"tool_{number}",
                description=f"Version {version}.",
                input_schema={"type": "object"},
            )
            for number in range(first, min(first + per_page, tools))
        ]
        following = str(page + 1) if page + 1 < pages else None
        return ListToolsResult(tools=page_tools, next_cursor=following)

    return Server("versions", version="1.0", on_list_tools=list_tools)


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--tools", type=int, default=100)
    arguments.add_argument("--pages", type=int, default=4)
    options = arguments.parse_args()
    serve(versioned(options.tools, options.pages), options)

"""`clinic`: server whose descriptions do not contain the words that people use for its tools.

python -m tests.support.upstreams.clinic [--http PORT]; stdio by default.
"""

from mcp.server import MCPServer

from tests.support.upstreams.serving import parser, serve


def clinic() -> MCPServer:
    """Build the server."""
    server = MCPServer("clinic", version="1.0", log_level="ERROR")

    @server.tool()
    def book_slot(provider_id: str) -> str:
        """Reserve a slot of a provider by its id."""
        return f"Reserved with {provider_id}."

    @server.tool()
    def day_report() -> str:
        """Report what happened today."""
        return "Nothing happened."

    @server.tool()
    def help_pages(program: str) -> str:
        """Open the help pages of a program."""
        return f"Help of {program}."

    @server.tool()
    def list_files() -> list[str]:
        """List the files."""
        return []

    @server.tool()
    def log_hours(hours: float) -> str:
        """Log the hours of a day."""
        return f"{hours} logged."

    @server.tool()
    def ask_colleague(question: str) -> str:
        """Ask a colleague who can answer a question."""
        return f"Asked: {question}"

    return server


if __name__ == "__main__":
    serve(clinic(), parser().parse_args())

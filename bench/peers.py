"""The peers of bench/dispatch.py, each installed in an environment of its own under .cache/parts.

python bench/peers.py fastmcp PORT TARGET...  runs FastMCP's proxy (in its environment), with one
connected client for all requests: the faster of the two ways it can be set up.
"""

import subprocess
import sys
from pathlib import Path

PARTS = Path(__file__).resolve().parent.parent / ".cache" / "parts"
PACKAGES = {"fastmcp": "fastmcp==4.1.2", "mcp-proxy": "mcp-proxy==0.13.0"}


def folder(name):
    return PARTS / f"bench-{name}"


def installed(name):
    """Return the folder of a peer's programs, installing it on first use; None where it cannot."""
    home, wanted = folder(name), PACKAGES[name]
    stamp = home / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        sys.stderr.write(f"Installing for the bench: {wanted} ...\n")
        made = [sys.executable, "-m", "venv", "--clear", str(home)]
        pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        for command in (made, [*pip, wanted]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.stderr.write(f"left out: {wanted} cannot be installed here\n")
                return None
        stamp.write_text(wanted)
    return home / "bin"


def fastmcp_proxy(port, target):
    """Serve a proxy. Runs in FastMCP's own environment."""
    import asyncio

    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.server import create_proxy

    where = target[0] if len(target) == 1 else StdioTransport(target[0], target[1:])

    async def serve():
        async with Client(where) as client:
            proxy = create_proxy(client, name="proxy")
            options = {"host": "127.0.0.1", "port": port, "show_banner": False}
            await proxy.run_async(transport="http", log_level="error", **options)

    asyncio.run(serve())


if __name__ == "__main__":
    fastmcp_proxy(int(sys.argv[2]), sys.argv[3:])

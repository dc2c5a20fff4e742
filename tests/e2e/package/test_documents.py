"""The shell commands of README.md and docs/, run in their order with an installed wheel."""

import json
import shutil
import subprocess

import pytest

from tests.e2e.package.test_wheels import Installed
from tests.support.documents import documents, shell_blocks
from tests.support.installation import ROOT
from tests.support.waiting import scaled

pytestmark = [pytest.mark.timeout(180)]
DEMO = {"mcpServers": {"demo": {"command": "python3", "args": ["-m", "servers.demo"]}}}
RUNNABLE = [path for path in documents() if any(not block.needs for block in shell_blocks(path))]


@pytest.fixture(scope="module")
def toolcrib(installed, tmp_path_factory):
    """A running installation, in a folder from which the commands of a clone work too."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / ".venv").symlink_to(installed.parent)
    shutil.copy(ROOT / "manage.py", folder)
    (folder / "mcp.json").write_text(json.dumps(DEMO))
    with Installed(installed, folder) as running:
        yield running


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda path: path.name)
def test_every_command_that_needs_nothing_else_succeeds(toolcrib, document):
    script = "\n".join(block.text for block in shell_blocks(document) if not block.needs)
    script = script.replace("localhost:8000", f"127.0.0.1:{toolcrib.port}")
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=toolcrib.cwd,
        env=toolcrib.env,
        stdin=subprocess.DEVNULL,
        check=False,
        capture_output=True,
        text=True,
        timeout=scaled(150),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if document.name == "quickstart.md":
        assert "69.8" in done.stdout  # 21 °C

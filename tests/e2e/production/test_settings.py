"""Production refuses to start with insecure settings, and names the variable."""

import secrets
import subprocess

import pytest

from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import scaled

KEY = secrets.token_urlsafe(48)
GOOD = {
    "DATABASE_URL": "postgresql://toolcrib:unused@127.0.0.1:1/toolcrib",
    "REDIS_URL": "redis://127.0.0.1:1/0",
    "TOOLCRIB_SECRET_KEY": KEY,
    "TOOLCRIB_ENCRYPTION_KEYS": secrets.token_urlsafe(48),
    "TOOLCRIB_HOSTS": "toolcrib.example.org",
}


def start(tmp_path, **changes):
    """Load the settings in a process; None removes a variable."""
    env = {**GOOD, "TOOLCRIB_DATA": str(tmp_path / "data"), **changes}
    return subprocess.run(
        ["python", "manage.py", "diffsettings", "--default", "toolcrib.health"],
        env=clean_environment({name: value for name, value in env.items() if value is not None}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(60),
    )


def test_production_starts_with_all_variables_and_writes_no_files(tmp_path):
    done = start(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "EMBEDDED = False" in done.stdout
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "variable", "message"),
    [
        ({"TOOLCRIB_SECRET_KEY": None}, "TOOLCRIB_SECRET_KEY", "is not set"),
        ({"TOOLCRIB_SECRET_KEY": ""}, "TOOLCRIB_SECRET_KEY", "is not set"),
        ({"TOOLCRIB_SECRET_KEY": "tiny-but-mine"}, "TOOLCRIB_SECRET_KEY", "too short"),
        ({"TOOLCRIB_SECRET_KEY": "change-me-" + KEY}, "TOOLCRIB_SECRET_KEY", "default"),
        ({"TOOLCRIB_SECRET_KEY": "django-insecure-" + KEY}, "TOOLCRIB_SECRET_KEY", "default"),
        ({"TOOLCRIB_ENCRYPTION_KEYS": None}, "TOOLCRIB_ENCRYPTION_KEYS", "is not set"),
        ({"TOOLCRIB_ENCRYPTION_KEYS": f"{KEY},short"}, "TOOLCRIB_ENCRYPTION_KEYS", "too short"),
        ({"TOOLCRIB_SECRET_KEY": None, "TOOLCRIB_SECRET_KEY_FILE": "/nowhere"}, "_FILE", "read"),
        ({"DEBUG": "1"}, "DEBUG", "must not be set"),
        ({"DEBUG": "maybe"}, "DEBUG", "must be 1 or 0"),
        ({"TOOLCRIB_HOSTS": None}, "TOOLCRIB_HOSTS", "must list"),
        ({"TOOLCRIB_HOSTS": "*"}, "TOOLCRIB_HOSTS", "Wildcards are not allowed"),
        (
            {"TOOLCRIB_HOSTS": "a.example,.example.org"},
            "TOOLCRIB_HOSTS",
            "Wildcards are not allowed",
        ),
        ({"REDIS_URL": None}, "REDIS_URL", "is not set"),
        ({"DATABASE_URL": None}, "DATABASE_URL", "is not set"),
        ({"DATABASE_URL": "sqlite:///x"}, "DATABASE_URL", "postgresql://"),
        ({"PORT": "0"}, "PORT", "integer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_it_refuses_to_start_and_names_the_variable(tmp_path, changes, variable, message):
    done = start(tmp_path, **changes)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert variable in last
    assert message in last
    # The value is not repeated: it may be close to a real key.
    assert KEY not in done.stderr


def test_a_secret_can_be_read_from_a_file(tmp_path):
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    done = start(tmp_path, TOOLCRIB_SECRET_KEY=None, TOOLCRIB_SECRET_KEY_FILE=str(file))
    assert done.returncode == 0, done.stderr

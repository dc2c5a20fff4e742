"""A client that openapi-python-client generates from the API's schema."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.installation import ROOT, clean_environment
from tests.support.waiting import scaled
from toolcrib.api import api

pytestmark = [pytest.mark.needs_openapi, pytest.mark.timeout(180)]
PROGRAM = ROOT / "tests" / "support" / "generated_client.py"


def run(argv, folder):
    return subprocess.run(
        [str(part) for part in argv],
        cwd=folder,
        env=clean_environment({}),
        check=False,
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )


def test_a_generated_client_opens_searches_loads_calls_and_edits_a_group(demo, tmp_path):
    toolcrib, key = demo
    programs = Path(parts.client_bin("openapi"))
    schema, config = tmp_path / "openapi.json", tmp_path / "config.json"
    schema.write_text(json.dumps(api.get_openapi_schema(), default=str))
    config.write_text('{"post_hooks": []}')
    generator = [programs / "openapi-python-client", "generate", "--meta", "none"]
    options = ["--path", schema, "--config", config, "--output-path", tmp_path / "crib"]
    made = run([*generator, *options], tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr

    arguments = [schema, toolcrib.url, key, toolcrib.token("admin")]
    done = run([programs / "python", PROGRAM, *arguments], tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads(done.stdout)
    name = "demo__convert_temperature"
    assert name in [tool["name"] for tool in answers["found"]["tools"]]
    assert [schema["name"] for schema in answers["loaded"]["schemas"]] == [name]
    assert answers["called"]["content"][0]["text"].startswith("69.8")
    assert answers["edited"]["description"] == "Convert units and look at the clock."

"""Secrets in calls reach their agent and nobody else: no file, log, export, backup, other agent."""

import gzip
import json
from urllib.parse import quote

from tests.support.agents import make_agent
from tests.support.installation import Installation
from tests.support.secrets import PLANTED
from tests.support.servers import register
from tests.support.upstreams.running import running_http

PASSPHRASE = "five random words in a row"
LIMITS = {"calls_per_minute": 10_000, "searches_per_minute": 10_000, "cost_per_minute": 100_000}


def plant(agent):
    """Send every secret in every way that an agent has; return the session."""
    session = agent.open(groups=["mcp:shop"], metadata={"all": [each.value for each in PLANTED]})
    assert session.get()["metadata"]["all"][0] == PLANTED[0].value  # its agent gets it back
    for number, planted in enumerate(PLANTED):
        text = json.dumps(planted.value)
        key = {"Idempotency-Key": f"key-{number}"}
        for tool, arguments in (
            ("shop__echo", planted.value),
            ("shop__echo", {"a": "word " * 14_000, "z": text, "note": text + "word " * 14_000}),
            ("shop__fail", {"secret": text}),
            ("shop__echo", text),
            (f"shop__{text}"[:190], {}),
        ):
            body = {"tool_name": tool, "arguments": arguments}
            answer = agent.send("POST", f"{session.path}/call", body, key)
            assert answer.status in (200, 409), answer.body
            if tool == "shop__echo" and arguments is planted.value:
                assert answer.json["structured_content"] == {"given": planted.value}
                again = agent.send("POST", f"{session.path}/call", body, key)
                assert again.body == answer.body
            key = None
        session.post("/search", {"query": text})
        agent.send("GET", f"{session.path}/tools/{quote(text, safe='')}")
    return session


def find_secrets(content):
    """Return the kinds of secrets in a text or bytes, also as JSON writes them."""
    data = content if isinstance(content, bytes) else content.encode()
    return [each.kind for each in PLANTED if each.secret.encode() in data]


def test_planted_secrets_of_many_kinds_are_in_no_clear_text(tmp_path):
    assert len(PLANTED) >= 24
    passphrase = {"TOOLCRIB_BACKUP_PASSPHRASE": PASSPHRASE}
    with Installation(tmp_path / "data") as toolcrib, running_http("workshop") as url:
        register(toolcrib, "shop", url)
        scout, other = (make_agent(toolcrib, name, **LIMITS) for name in ("scout", "other"))
        session = plant(scout)

        foreign = other.open(groups=["mcp:shop"])
        body = {"tool_name": "shop__echo", "arguments": {"n": 1}}
        replies = [
            other.send("GET", session.path),
            other.send("GET", f"{session.path}/events"),
            *(
                other.send("POST", f"{foreign.path}/call", body, {"Idempotency-Key": f"key-{n}"})
                for n in range(3)
            ),
        ]
        assert [find_secrets(reply.body) for reply in replies] == [[]] * 5

        exported = toolcrib.api("GET", f"{session.path}/export", token=toolcrib.token("operator"))
        assert exported[0] == 200
        assert len(exported[1]["events"]) > 5 * len(PLANTED)
        assert find_secrets(json.dumps(exported[1], ensure_ascii=False)) == []

        for options in (("--plain",), ()):
            file = tmp_path / f"backup{len(options)}"
            done = toolcrib.command("backup", *options, str(file), env=passphrase)
            assert done.returncode == 0, done.stderr
            assert find_secrets(done.stdout + done.stderr) == []
            assert find_secrets(file.read_bytes()) == []
        plain = gzip.decompress((tmp_path / "backup1").read_bytes())
        assert b"sessions_app.call" in plain
        assert b"callanswer" not in plain
        assert find_secrets(plain) == []

        for path in (tmp_path / "data").rglob("*"):
            if path.is_file():
                assert find_secrets(path.read_bytes()) == [], path.name
    assert find_secrets(toolcrib.log) == []

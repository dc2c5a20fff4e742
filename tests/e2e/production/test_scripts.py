"""Paused scripts with two web processes and one PostgreSQL: any process continues them, once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.live.test_script_kills import CODES, RULE
from tests.support.agents import make_agent
from tests.support.servers import register
from tests.support.upstreams.running import running_http

pytestmark = [
    pytest.mark.needs_redis,
    pytest.mark.needs_postgres,
    pytest.mark.timeout(240),
]


def test_scripts_paused_in_a_killed_process_continue_once_in_another(production, tmp_path):
    journal = tmp_path / "journal"
    production.start_all("web", "web", "worker")
    with (
        running_http("counting", "--journal", str(journal)) as upstream,
        ThreadPoolExecutor(8) as pool,
    ):
        register(production, "office", upstream)
        assert production.api("POST", "/rules", RULE)[0] == 201
        sessions = [
            make_agent(production, f"scripts-{n}", code_mode=True).open(mode="deferred")
            for n in range(4)
        ]

        def start(number):
            session, language = sessions[number], list(CODES)[number % 2]
            body = {"code": CODES[language], "language": language, "input": f"script-{number}"}
            return session.agent.send("POST", f"{session.path}/scripts", body).json

        paused = list(pool.map(start, range(len(sessions))))
        assert [answer["status"] for answer in paused] == ["held"] * len(sessions), paused
        production.processes["web-0"].kill()  # it ran all of them
        production.url = production.urls[1]
        held = [call["call_id"] for answer in paused for call in answer["calls"][-1:]]
        operator = production.token("operator")

        def allow(call_id):
            return production.api(
                "POST", f"/calls/{call_id}/decision", {"decision": "allow"}, operator
            )[0]

        # Each twice at once: the second of a pair finds it decided.
        assert sorted(pool.map(allow, held * 2)) == [200] * len(held) + [409] * len(held)

        def end(number):
            agent = sessions[number].agent.at_url(production.url)
            path = f"/scripts/{paused[number]['run_id']}?wait=20"
            answer = agent.send("GET", path).json
            while answer["status"] in ("running", "held"):
                answer = agent.send("GET", path).json
            return answer

        ended = list(pool.map(end, range(len(sessions))))
        assert [(answer["status"], answer["result"]) for answer in ended] == [
            ("completed", "done")
        ] * len(sessions)
        assert {len(answer["calls"]) for answer in ended} == {10}
        stamps = [line for line in journal.read_text().splitlines() if line.startswith("stamp ")]
        assert sorted(stamps) == sorted(
            f"stamp script-{number}-{paper}"
            for number in range(len(sessions))
            for paper in [*range(9), "ask"]
        )

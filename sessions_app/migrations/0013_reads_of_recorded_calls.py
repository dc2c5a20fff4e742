"""Record what sessions have read and agents have used so far, for rules that ask for it."""

from django.db import migrations

RESULTS = "sent_at IS NOT NULL AND finished_at IS NOT NULL AND agent_id IS NOT NULL"
READS = f"""
INSERT INTO sessions_app_sessionread (session_id, agent_id, server_slug, last_at)
SELECT session_id, agent_id, server_slug, MAX(finished_at) FROM sessions_app_call
WHERE {RESULTS} AND session_id IS NOT NULL AND server_slug <> ''
GROUP BY session_id, agent_id, server_slug
"""  # noqa: S608
USES = f"""
INSERT INTO sessions_app_tooluse (agent_id, tool_id, first_at)
SELECT agent_id, tool_id, MIN(accepted_at) FROM sessions_app_call
WHERE tool_id IS NOT NULL AND agent_id IS NOT NULL AND ({RESULTS} OR state = 'client')
GROUP BY agent_id, tool_id
"""  # noqa: S608


class Migration(migrations.Migration):
    dependencies = [
        ("sessions_app", "0012_rules"),
    ]

    operations = [
        migrations.RunSQL(READS, "DELETE FROM sessions_app_sessionread"),
        migrations.RunSQL(USES, "DELETE FROM sessions_app_tooluse"),
    ]

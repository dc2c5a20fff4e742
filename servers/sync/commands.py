"""What the commands share: syncing many servers in this process."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from django.db import connection

from servers.models import Server, SyncRun
from servers.sync import runner
from toolcrib.lib.errors import ToolcribError


def sync_side_by_side(
    servers: Sequence[Server], trigger: str
) -> dict[int, SyncRun | ToolcribError]:
    """Sync them all and wait; a hung one delays no other."""

    def one(server: Server) -> SyncRun | ToolcribError:
        try:
            return runner.sync_now(server.pk, trigger)
        except ToolcribError as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(max_workers=8) as threads:
        return dict(zip((server.pk for server in servers), threads.map(one, servers), strict=True))

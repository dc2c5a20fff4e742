# Toolcrib in a container. The same image runs every part; docker-compose.yml gives the commands.
FROM python:3.13-slim

# Two malloc arenas for all threads: memory freed by one thread is reused by the others.
ENV PYTHONUNBUFFERED=1 \
    MALLOC_ARENA_MAX=2 \
    PYTHONDONTWRITEBYTECODE=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /app

# First, so that a change of code does not install everything again.
COPY requirements.lock ./
RUN pip install --no-deps --require-hashes -r requirements.lock \
    && useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin toolcrib

COPY manage.py ./
COPY toolcrib ./toolcrib
COPY clients/python/src ./clients/python/src
COPY catalog ./catalog
COPY servers ./servers
COPY sessions_app ./sessions_app
COPY templates ./templates
COPY static ./static
RUN python -m compileall -q toolcrib catalog servers sessions_app

USER toolcrib
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=6s --start-period=60s --retries=3 \
    CMD ["python", "-m", "toolcrib.health", "web"]
CMD ["python", "manage.py", "serve", "--web-only", "--host", "0.0.0.0"]

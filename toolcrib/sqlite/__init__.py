"""SQLite database backend for many threads: fair write queue and connection reuse."""

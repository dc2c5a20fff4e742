"""SQLite for many threads of one process: writers take turns, and connections are used again."""

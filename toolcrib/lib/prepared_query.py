"""Questions that every request asks: Django writes their SQL once, and it is kept.

To write the SQL of a question with a few joins takes Django longer than it takes the database to
answer it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Expression, Model, QuerySet
from django.db.models.query import get_related_populators

M = TypeVar("M", bound=Model)


class Blank(Expression):
    """Stands in a question for a value that is given when it is asked."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def as_sql(self, compiler: object, connection: object) -> tuple[str, Any]:
        return "%s", [self]


class PreparedQuery(Generic[M]):
    """A question with blanks. `write` makes its rows of them; it must add nothing of its own.

    Values are given to the database as they are, so they are of the column's own type. Rows have
    what `select_related` and `defer` say; nothing is annotated or prefetched.
    """

    def __init__(self, blanks: int, write: Callable[..., "QuerySet[M]"]) -> None:
        self._blanks, self._write = blanks, write
        self._written: dict[str, _Written[M]] = {}  # by the kind of database

    def all(self, *values: str | int) -> list[M]:
        written = self._written.get(connection.vendor)
        if written is None:
            rows = self._write(*(Blank(at) for at in range(self._blanks)))
            written = self._written[connection.vendor] = _Written(rows)
        return list(written.rows(values))

    def first(self, *values: str | int) -> M | None:
        """Return the only row, or None."""
        return next(iter(self.all(*values)), None)


class _Written(Generic[M]):
    """A question as SQL, and how its rows become models: the work of Django's ModelIterable."""

    def __init__(self, rows: "QuerySet[M]") -> None:
        compiler: Any = rows.query.get_compiler(rows.db)
        self._db = rows.db
        self._sql, self._params = compiler.as_sql()
        select, about = compiler.select, compiler.klass_info
        self._model: type[M] = about["model"]
        self._columns = slice(about["select_fields"][0], about["select_fields"][-1] + 1)
        self._names = [column[0].target.attname for column in select[self._columns]]
        self._related = get_related_populators(about, select, rows.db)  # type: ignore[call-arg]
        self._converters = list(compiler.get_converters([column[0] for column in select]).items())

    def rows(self, values: Sequence[str | int]) -> Iterator[M]:
        given = [values[one.at] if isinstance(one, Blank) else one for one in self._params]
        with connection.cursor() as cursor:
            cursor.execute(self._sql, given)
            found = cursor.fetchall()
        for row in map(list, found):
            for at, (converters, expression) in self._converters:
                for converter in converters:
                    row[at] = converter(row[at], expression, connection)
            made = self._model.from_db(self._db, self._names, row[self._columns])
            for related in self._related:
                related.populate(row, made)
            yield made

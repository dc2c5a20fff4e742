"""Prepared queries: the SQL of a queryset, compiled once and reused with new parameters.

For queries that run on every request: compiling the SQL of a query with a few joins takes Django
longer than the database takes to execute it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from django.db import connection
from django.db.models import Expression, Model, QuerySet
from django.db.models.query import get_related_populators

M = TypeVar("M", bound=Model)


class Placeholder(Expression):
    """A query parameter whose value is supplied at execution."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def as_sql(self, compiler: object, connection: object) -> tuple[str, Any]:
        return "%s", [self]


class PreparedQuery(Generic[M]):
    """A queryset with placeholders. `build` returns it for them and must add no values of its own.

    Values reach the database unconverted, so they must have the column's own type. `select_related`
    and `defer` are supported; annotations and prefetching are not.
    """

    def __init__(self, placeholders: int, build: Callable[..., "QuerySet[M]"]) -> None:
        self._placeholders, self._build = placeholders, build
        self._compiled: dict[str, _CompiledQuery[M]] = {}  # by database vendor

    def all(self, *values: str | int) -> list[M]:
        """Return the rows for these parameters."""
        compiled = self._compiled.get(connection.vendor)
        if compiled is None:
            rows = self._build(*(Placeholder(index) for index in range(self._placeholders)))
            compiled = self._compiled[connection.vendor] = _CompiledQuery(rows)
        return list(compiled.rows(values))

    def first(self, *values: str | int) -> M | None:
        """Return the only row, or None."""
        return next(iter(self.all(*values)), None)


class _CompiledQuery(Generic[M]):
    """SQL and row conversion of a queryset: the work of Django's ModelIterable."""

    def __init__(self, rows: "QuerySet[M]") -> None:
        compiler: Any = rows.query.get_compiler(rows.db)
        self._db = rows.db
        self._sql, self._params = compiler.as_sql()
        select, klass_info = compiler.select, compiler.klass_info
        self._model: type[M] = klass_info["model"]
        self._columns = slice(klass_info["select_fields"][0], klass_info["select_fields"][-1] + 1)
        self._names = [column[0].target.attname for column in select[self._columns]]
        self._related = get_related_populators(klass_info, select, rows.db)  # type: ignore[call-arg]
        self._converters = list(compiler.get_converters([column[0] for column in select]).items())

    def rows(self, values: Sequence[str | int]) -> Iterator[M]:
        params = [
            values[param.index] if isinstance(param, Placeholder) else param
            for param in self._params
        ]
        with connection.cursor() as cursor:
            cursor.execute(self._sql, params)
            fetched = cursor.fetchall()
        for row in map(list, fetched):
            for index, (converters, expression) in self._converters:
                for converter in converters:
                    row[index] = converter(row[index], expression, connection)
            instance = self._model.from_db(self._db, self._names, row[self._columns])
            for related in self._related:
                related.populate(row, instance)
            yield instance

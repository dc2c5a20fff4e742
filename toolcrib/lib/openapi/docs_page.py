"""The page of the API reference: Swagger UI in the theme of the other pages."""

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from ninja import NinjaAPI
from ninja.openapi.docs import Swagger


class ApiReference(Swagger):
    template = "toolcrib/pages/api_docs.html"

    def render_page(self, request: HttpRequest, api: NinjaAPI, **kwargs: Any) -> HttpResponse:
        settings = {**self.settings, "url": self.get_openapi_url(api, kwargs)}
        return render(request, self.template, {"api": api, "settings": settings})

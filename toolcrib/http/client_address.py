"""The address of a client, for limits: of the connection, or as a trusted proxy reports it."""

import ipaddress
from functools import lru_cache

from django.conf import settings
from django.http import HttpRequest

IPV6_PREFIX = 64  # bits; one customer of a provider has all addresses below it
MAX_FORWARDED = 50  # entries of X-Forwarded-For that are read


@lru_cache(maxsize=4)
def _networks(
    proxies: tuple[str, ...],
) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(text, strict=False) for text in proxies)


def _parse(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.strip())
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def is_trusted_proxy(text: str) -> bool:
    """Return whether an address is listed in TOOLCRIB_PROXIES."""
    address = _parse(text) if settings.PROXIES else None
    return address is not None and any(
        address in network for network in _networks(tuple(settings.PROXIES))
    )


def limited_address(text: str) -> str:
    """Return the address under which a client is counted: of IPv6 the network of a customer."""
    address = _parse(text)
    if isinstance(address, ipaddress.IPv6Address):
        network = ipaddress.ip_network((address, IPV6_PREFIX), strict=False)
        return str(network.network_address)
    return str(address or text)


def client_address(request: HttpRequest) -> str:
    """Return the address of a request's client under which it is counted.

    Of X-Forwarded-For only what trusted proxies appended is used, since clients can send it too.
    """
    address = request.META.get("REMOTE_ADDR", "")
    forwarded = request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")[-MAX_FORWARDED:]
    while forwarded and is_trusted_proxy(address):
        reported = forwarded.pop().strip()
        if _parse(reported) is None:
            break
        address = reported
    return limited_address(address)

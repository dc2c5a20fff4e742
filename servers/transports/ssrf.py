"""SSRF protection: decide which IP addresses Toolcrib may connect to.

Allowed are the public internet and the networks in TOOLCRIB_ALLOWED_NETWORKS. Opens no
connection; http.py checks every address here before connecting to it.
"""

import ipaddress
from collections.abc import Iterable, Sequence

from django.conf import settings

from servers.errors import ParkedError

NON_HTTP_PORTS = {
    0: "nothing", 7: "echo", 9: "discard", 19: "chargen",
    20: "FTP", 21: "FTP", 22: "SSH", 23: "Telnet", 25: "mail", 53: "DNS", 69: "TFTP",
    110: "mail", 111: "RPC", 119: "news", 135: "Windows RPC", 137: "NetBIOS", 139: "NetBIOS",
    143: "mail", 161: "SNMP", 389: "LDAP", 445: "SMB", 465: "mail", 512: "rexec", 513: "rlogin",
    514: "rsh", 587: "mail", 636: "LDAP", 873: "rsync", 993: "mail", 995: "mail",
    1433: "SQL Server", 1521: "Oracle", 1723: "PPTP", 2049: "NFS", 2375: "Docker", 3306: "MySQL",
    3389: "Remote Desktop", 4369: "Erlang", 5432: "PostgreSQL", 5672: "AMQP", 5900: "VNC",
    6000: "X11", 6379: "Redis", 6380: "Redis", 6667: "IRC", 9042: "Cassandra", 9092: "Kafka",
    11211: "memcached", 27017: "MongoDB", 27018: "MongoDB", 27019: "MongoDB",
}  # fmt: skip

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Translation and reserved ranges that ipaddress reports as global in some Python versions.
NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48")
]
METADATA = ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")


def allowed_networks() -> list[Network]:
    return [ipaddress.ip_network(text, strict=False) for text in settings.ALLOWED_NETWORKS]


def check_address(text: str, allowed: Iterable[Network]) -> Address:
    """Return the address to connect to, or raise. IPv4-mapped IPv6 is checked as IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if any(address.version == net.version and address in net for net in allowed):
        return address
    for candidate in (address, *_embedded_addresses(address)):
        if kind := _non_public_kind(candidate):
            raise ParkedError(
                f"The host resolves to {kind}, which Toolcrib may not connect to.",
                code="blocked",
                hint="For a server in your own network, add the network to "
                "TOOLCRIB_ALLOWED_NETWORKS, e.g. 10.1.0.0/16.",
            )
    return address


def _embedded_addresses(address: Address) -> Sequence[Address]:
    """Return the IPv4 addresses that a gateway (NAT64, 6to4, Teredo) would forward to."""
    if isinstance(address, ipaddress.IPv4Address):
        return ()
    if address in NAT64:
        return (ipaddress.IPv4Address(int(address) & 0xFFFFFFFF),)
    if address.sixtofour:
        return (address.sixtofour,)
    return address.teredo or ()


def _non_public_kind(address: Address) -> str:
    """Describe an address outside the public internet; return "" for a public one."""
    if str(address) in METADATA:
        return "a cloud metadata service"
    if address.is_loopback:
        return "this machine itself (a loopback address)"
    if address.is_unspecified:
        return "this machine itself (the unspecified address)"
    if address.is_link_local:
        return "a link-local address"
    if address.is_multicast:
        return "a multicast address"
    if isinstance(address, ipaddress.IPv6Address) and address.is_site_local:
        return "a private address"
    if any(address.version == net.version and address in net for net in NOT_PUBLIC):
        return "a shared or reserved address"
    if address.is_global:
        return ""
    return "a private address" if address.is_private else "a shared or reserved address"

"""SNMP: one visit to one device, that ends by its deadline whatever the device sends, and shows no secret."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from gufo.snmp import (
    Aes128Key,
    BaseAuthKey,
    NoSuchInstance,
    Sha1Key,
    Sha256Key,
    Sha512Key,
    SnmpAuthError,
    SnmpVersion,
    User,
)
from gufo.snmp.aio import SnmpSession

from agent.settings import PduTarget

Answer = TypeVar("Answer")
Index = tuple[int, ...]
Value = int | str
Trouble = Literal["silent", "unknown_host", "refused", "broken"]

TRIES = 2
REQUEST_PART = 1 / 3
"""A request waits for this part of the visit's time, so that a lost packet costs a try and not the visit."""

ROWS_LIMIT = 512  # in a column; the largest PDU has some dozens of rows
TEXT_LIMIT = 256
AUTHENTICATIONS: Sequence[type[BaseAuthKey]] = (Sha1Key, Sha256Key, Sha512Key)


class SnmpTrouble(Exception):
    """Why a visit brought nothing. silent: no answer (a wrong community looks like that); unknown_host: the name has no address;
    refused: user or password are not accepted; broken: an answer that is not SNMP.
    """

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble)
        self.trouble = trouble


class Device(Protocol):
    """What a reader asks of a device. OIDs are numbers joined by dots, without a leading one."""

    async def get(self, oid: str) -> Value | None:
        """One value; None where the device has none."""
        ...

    async def column(self, oid: str) -> Mapping[Index, Value]:
        """A table's column: value by the rest of each row's OID; empty where the device has no such table."""
        ...


def visit(target: PduTarget, read: Callable[[Device], Awaitable[Answer]]) -> Answer:
    """What `read` makes of the device. Returns by the target's deadline (a name that must be looked up comes on top); SnmpTrouble
    says why there is nothing.

    Version 3 needs a user and uses SHA-1, SHA-256 or SHA-512, whichever is accepted, with AES-128 where there is a privacy password.
    """
    address = _address(target)
    try:
        return asyncio.run(asyncio.wait_for(_visit(target, address, read), target.deadline_s))
    except SnmpTrouble:
        raise
    except OSError:  # late, or closed
        raise SnmpTrouble("silent") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # the library panics (which is no Exception) on some malformed answers
        raise SnmpTrouble("broken") from None


async def _visit(target: PduTarget, address: str, read: Callable[[Device], Awaitable[Answer]]) -> Answer:
    for user in _users(target):
        session = SnmpSession(
            address,
            port=target.port,
            community=target.community,
            user=user,
            version=SnmpVersion.v3 if user else SnmpVersion.v2c,
            timeout=target.deadline_s * REQUEST_PART,
        )
        try:
            async with session:
                return await read(_Session(session))
        except SnmpAuthError:
            continue
    raise SnmpTrouble("refused")


def _users(target: PduTarget) -> Sequence[User | None]:
    """The ways to log in, in the order in which they are tried; None is version 2c."""
    if not target.user:
        return [None]
    if not target.auth_password:
        return [User(target.user)]
    password, privacy = target.auth_password.encode(), target.privacy_password.encode()
    return [
        User(target.user, auth_key=key(password), priv_key=Aes128Key(privacy) if privacy else None)
        for key in AUTHENTICATIONS
    ]


def _address(target: PduTarget) -> str:
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)
        return str(found[0][4][0])
    except (OSError, UnicodeError):
        raise SnmpTrouble("unknown_host") from None


@dataclass(frozen=True, slots=True)
class _Session:
    """A device behind a session of the library."""

    session: SnmpSession

    async def get(self, oid: str) -> Value | None:
        try:
            return _plain(await _again(lambda: self.session.get(oid)))
        except NoSuchInstance:
            return None

    async def column(self, oid: str) -> Mapping[Index, Value]:
        return await _again(lambda: self._rows(oid))

    async def _rows(self, oid: str) -> Mapping[Index, Value]:
        rows: dict[Index, Value] = {}
        async for name, value in self.session.getbulk(oid):
            if len(rows) >= ROWS_LIMIT or not name.startswith(f"{oid}."):
                break
            plain = _plain(value)
            if plain is not None:
                rows[tuple(int(part) for part in name[len(oid) + 1 :].split("."))] = plain
        return rows


async def _again(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask once more where no answer came: packets get lost."""
    for _ in range(TRIES - 1):
        try:
            return await ask()
        except TimeoutError:
            continue
    return await ask()


def _plain(value: object) -> Value | None:
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, bytes):
        return value[:TEXT_LIMIT].decode("utf-8", "replace")
    return value[:TEXT_LIMIT] if isinstance(value, str) else None

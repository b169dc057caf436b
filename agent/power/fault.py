"""BmcFault: why a visit to a BMC brought nothing at all, in a form that can be said in any language."""

from __future__ import annotations

from enum import StrEnum

from telemetry.lineprotocol import printable

REASON_LIMIT = 160


class Trouble(StrEnum):
    """What keeps a BMC from being read; each has its sentence and its remedy under `agent.bmc.fault` and `agent.bmc.remedy`."""

    UNREACHABLE = "unreachable"  # nothing answers at the address
    SLOW = "slow"  # it does not finish within the deadline
    UNTRUSTED = "untrusted"  # the certificate is not one to give a password to
    REFUSED = "refused"  # user or password are wrong, or the account is locked
    CROWDED = "crowded"  # it has no session left
    UNUSABLE = "unusable"  # it answers, and not with what its protocol asks for
    UNEQUIPPED = "unequipped"  # this host lacks what reading it needs: a program, a device, a right


class BmcFault(Exception):
    """A visit that failed. `reason` is a few words for a person, cleaned and cut short; no password is ever part of it.
    `fingerprint` is the SHA-256 of the certificate that was not trusted, as colon-separated hexadecimal.
    """

    def __init__(self, trouble: Trouble, reason: str = "", fingerprint: str = "") -> None:
        self.trouble = trouble
        self.reason = printable(reason)[:REASON_LIMIT]
        self.fingerprint = fingerprint
        super().__init__(f"{trouble.value}: {self.reason}" if self.reason else trouble.value)

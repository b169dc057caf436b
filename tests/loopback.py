"""HTTP to a server of the test on loopback: by no proxy, patiently, and without the certificates that httpx else reads for each call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import httpx

PATIENT_S = 120.0


def get(url: str, **how: Any) -> httpx.Response:
    return httpx.get(url, verify=False, trust_env=False, **{"timeout": PATIENT_S, **how})


def post(url: str, **how: Any) -> httpx.Response:
    return httpx.post(url, verify=False, trust_env=False, **{"timeout": PATIENT_S, **how})


def stream(method: str, url: str, **how: Any) -> AbstractContextManager[httpx.Response]:
    return httpx.stream(method, url, verify=False, trust_env=False, **{"timeout": PATIENT_S, **how})

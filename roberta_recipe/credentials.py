"""Credentials: detection in argument values, redaction in log lines and error messages."""

import logging
import os
import re
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"\w[\w+.-]*://[^\s'\"]+")
_USER = re.compile(r"(\w[\w+.-]*://)[^\s/'\"]+@")  # http://user:password@host
_VALUE = re.compile(r"([?&][^\s=&?'\"]*=)[^\s&'\"#]+")  # of a URL's query
_SECRET_VALUE = re.compile(r"[?&][^\s=&?'\"]*(token|key|secret|sig|pass|pwd|auth|cred)[^\s=&?'\"]*=[^\s&'\"#]", re.I)
_HUB_TOKEN = re.compile(r"\bhf_(?:\w+_)?[A-Za-z0-9]{20,}")  # also hf_oauth_...
_VARIABLE = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY|CREDENTIALS?)(_|$)", re.I)
_MIN_LENGTH = 8  # shorter values of such variables ("true") are not secrets


def redact(text: str) -> str:
    """`text` with secrets as `***`: users and query values of URLs, Hub tokens, values of environment variables with
    a name like token, key, secret or password."""
    values = (value for name, value in os.environ.items() if _VARIABLE.search(name) and len(value) >= _MIN_LENGTH)
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _URL.sub(lambda url: _VALUE.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", url[0])), text)
    return _HUB_TOKEN.sub(HIDDEN, text)


def holds_secret(value: Any) -> bool:
    """Whether a flag's value (also a list) contains a password, a token or a key."""
    if isinstance(value, list):
        return any(map(holds_secret, value))
    if not isinstance(value, str):
        return False
    in_url = "://" in value and (_USER.search(value) or _SECRET_VALUE.search(value))
    return bool(in_url or _HUB_TOKEN.search(value))


def redact_record(record: logging.LogRecord) -> bool:
    """Logging filter that redacts secrets."""
    record.msg, record.args = redact(record.getMessage()), None
    return True

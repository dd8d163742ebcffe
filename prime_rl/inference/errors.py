"""Errors that a client of the server sees: OpenAI's error shape, one clear line, never a traceback.

Used by the guard of both engines and by the embedded engine. Independent of a web framework.
"""

from __future__ import annotations

from typing import Any

from prime_rl.utils.text import one_line

MAX_MESSAGE_CHARS = 1000
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    503: "ServiceUnavailableError",
}


class ApiError(Exception):
    """A request that is refused.

    `status` is the HTTP status, `param` the field that is wrong, where there is one; `retry_after_s` is when the same
    request may be taken.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        # Both may have what the client sent in them.
        self.message = one_line(message, MAX_MESSAGE_CHARS)
        self.param = param and one_line(param)
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """OpenAI's JSON for this error."""
        return error_body(self.status, self.message, param=self.param)


def error_body(status: int, message: str, *, param: str | None = None) -> dict[str, Any]:
    """OpenAI's JSON for an error; `param` is the field that is wrong, where there is one."""
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}

"""Errors that a client of the server sees: OpenAI's error shape, one clear line, never a traceback.

Used by the guard of both engines and by the embedded engine. Independent of a web framework. And the error that ends
the server itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_rl.contract.served import refusal
from prime_rl.utils.text import one_line

MAX_MESSAGE_CHARS = 1000
# What a client reads of an adapter whose numbers overflow.
NOT_FINITE = "logits are not finite: its weights are too large, lower optim.lr"
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "InvalidAdapterError",
    429: "RateLimitError",
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
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}


class StartError(RuntimeError):
    """The server cannot start, or its engine failed; `exit_code` is 1, or 2 when the config itself is wrong."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def adapter_refused(name: str, error: ValueError | OSError) -> ApiError:
    """The error for an adapter that is not loaded: 422 for what is in its files, 400 when they cannot be read now."""
    status = 422 if isinstance(error, ValueError) else 400
    return ApiError(status, f"adapter {name!r} is refused: {error}", param="lora_path")


def check_ranges(body: Mapping[str, Any]) -> None:
    """Raises ApiError (400) for a sampling parameter of a request that is outside of its range, in both engines."""
    if refused := refusal(body):
        name, problem = refused
        raise ApiError(400, problem, param=name)

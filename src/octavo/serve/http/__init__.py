"""An HTTP endpoint that clients of OpenAI's API can use, on Starlette and uvicorn; see docs/http.md."""

try:
    from octavo.serve.http.app import Api
    from octavo.serve.http.errors import ApiError
    from octavo.serve.http.limits import Limits
    from octavo.serve.http.server import bind, running, serve, url_of
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
        raise
    raise ModuleNotFoundError(
        f"an HTTP server needs the package {_error.name!r}; install it with: pip install 'octavo[serve]'",
        name=_error.name,
    ) from None

__all__ = ["Api", "ApiError", "Limits", "bind", "running", "serve", "url_of"]
